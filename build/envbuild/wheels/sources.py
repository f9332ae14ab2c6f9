"""The sdists of a lock: found by name and version, taken only with the digest that the lock states."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.utils import canonicalize_name

from envbuild.catalog.models import Base
from envbuild.catalog.site import Site
from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import Reporter
from envbuild.lock.metadata import FILE, PYPROJECT, build_requires, fetch_sdist, kept_declarations
from envbuild.lock.releases import look_up
from envbuild.lock.workplace import Workplace
from envbuild.store.local import LocalStore
from envbuild.wheels.key import Parts


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where sdists come from: the store, else the package index that uv uses."""

    base: Base
    site: Site
    store: LocalStore
    reporter: Reporter

    def sdist(self, name: str, version: str, digest: str) -> bytes:
        """The bytes of an sdist, with the digest that the lock states.

        Raises:
            CheckRefusedError: the index has another file of that name and version.
            NetworkError: it cannot be downloaded.
        """
        kept = self.store.find("files", digest)
        if kept is not None:
            return (kept / FILE).read_bytes()
        with self.reporter.step(f"download the sdist of {name} {version}"), self.store.staging("sdist") as folder:
            work = Workplace(
                folder=folder,
                log=self.store.root / "logs" / "wheels" / "sdists.log",
                site=self.site,
                store=self.store,
                reporter=self.reporter,
            )
            found = look_up({name: f"=={version}"}, self.base, {}, f"find {name} {version}", work)
            package = found[canonicalize_name(name)]
            stated = str(package.get("sdist", {}).get("hash", ""))
            if stated and stated != digest:
                raise _other(name, version, digest, stated)
            content, came = fetch_sdist(package, folder, self.site, self.store)
        if came != digest:
            raise _other(name, version, digest, came)
        return content

    def archive(self, parts: Parts) -> bytes:
        """The sources of a wheel, as an archive with one folder on top."""
        return self.sdist(parts.package, parts.version, parts.sdist)

    def build_requires(self, name: str, version: str, digest: str) -> tuple[str, ...]:
        """What the sdist declares to be built with, as PEP 508 lines (PEP 518)."""
        files = kept_declarations(name, digest, lambda: self.sdist(name, version, digest), self.store)
        try:
            return build_requires(files[PYPROJECT].decode() if PYPROJECT in files else None)
        except ValueError as error:
            raise CheckRefusedError(
                f"the sdist of {name} {version} cannot be built",
                why=f"Its pyproject.toml cannot be read: {error}",
                fix="Choose another version of the component and lock again.",
            ) from error


def _other(name: str, version: str, locked: str, found: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"the sdist of {name} {version} is not the one that was locked",
        why=f"Locked {locked}, the index has {found}.",
        fix="Find out who changed it; if the change is wanted, lock again with --upgrade.",
    )
