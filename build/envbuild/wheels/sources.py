"""The sources of a lock's compiled packages: sdists with the digest that the lock states, and commits."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.catalog.base import Base
from envbuild.catalog.context import Context
from envbuild.catalog.site import Site
from envbuild.core.digests import digest_of
from envbuild.core.errors import CheckRefusedError
from envbuild.core.progress import Reporter
from envbuild.git.checkout import archive_of_commit
from envbuild.lock.components.downloads import FILE, fetch_sdist
from envbuild.lock.components.project_metadata import PYPROJECT, build_requires
from envbuild.lock.components.sdist_metadata import kept_declarations
from envbuild.lock.context import LockContext, run_context
from envbuild.lock.uv.package_index import PackageIndex
from envbuild.lock.uv.torch_builds import locked_indexes
from envbuild.store.local import LocalStore
from envbuild.wheels.key import KeyParts


def version_variables(name: str, version: str, tree: Path) -> dict[str, str]:
    """The variables that state the version of a package whose sources have no history to take it from.

    Args:
        tree: the folder of the package.
    """
    variables = {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_" + name.replace("-", "_").upper(): version}
    project = tree / "pyproject.toml"
    # It has one variable, for whatever is built (nvidia-resiliency-ext).
    if project.is_file() and "poetry-dynamic-versioning" in project.read_text(errors="replace"):
        variables["POETRY_DYNAMIC_VERSIONING_BYPASS"] = version
    return variables


def only_folder(archive: bytes, folder: str) -> bytes:
    """The files of one folder of such an archive, with that folder on top."""
    made = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as old, tarfile.open(fileobj=made, mode="w") as new:
        for member in old:
            top, _, path = member.name.partition("/")
            if member.isreg() and path.startswith(f"{folder}/"):
                member.name = f"{top}/{path.removeprefix(f'{folder}/')}"
                new.addfile(member, old.extractfile(member))
    return made.getvalue()


@dataclass(frozen=True, kw_only=True)
class SourceOrigin:
    """What a package is built from.

    Attributes:
        sdist: its digest; empty for a commit.
        index: the index of its own that has the sdist, by name; empty for the site's own.
        git: the repository; empty for an sdist.
        subdirectory: the folder of the repository that holds the package; empty for its top.
    """

    package: str
    version: str
    sdist: str = ""
    index: str = ""
    git: str = ""
    commit: str = ""
    subdirectory: str = ""

    def is_of(self, parts: KeyParts) -> bool:
        """Whether a wheel with these parts was built from this."""
        own = (self.package, self.sdist, self.commit, self.subdirectory)
        return own == (parts.package, parts.sdist, parts.commit, parts.subdirectory)


@dataclass(frozen=True, kw_only=True)
class WheelSources:
    """Where sources come from: the store, else the package index that uv uses, or git."""

    base: Base
    site: Site
    store: LocalStore
    reporter: Reporter

    def sdist(self, name: str, version: str, digest: str, index: str = "") -> bytes:
        """The bytes of an sdist, with the digest that the lock states.

        Raises:
            CheckRefusedError: the index has another file of that name and version.
            ConfigurationError: the site does not say where the sdist's own index is.
            NetworkError: it cannot be downloaded.
        """
        kept = self.store.find("files", digest)
        if kept is not None:
            return (kept / FILE).read_bytes()
        with self.reporter.step(f"download the sdist of {name} {version}"), self.workplace("sdists") as work:
            # uv looks it up, so that its index, find-links and credentials hold here too.
            own = locked_indexes(self.site, {index: [name]} if index else {}, f"{name} {version}")
            asked = PackageIndex(base=self.base, context=work, own=own)
            packages = asked.find({name: f"=={version}"}, f"find {name} {version}")
            package = packages[canonicalize_name(name)]
            stated = package.sdist.digest if package.sdist is not None else ""
            # Refused before the download. Hashes are optional (PEP 503): without one the file itself is compared below.
            if stated and stated != digest:
                raise _other(name, version, digest, stated)
            content, came = fetch_sdist(package, work)
        if came != digest:
            raise _other(name, version, digest, came)
        return content

    @contextlib.contextmanager
    def workplace(self, label: str) -> Iterator[LockContext]:
        """A place to ask the index from, with the log ``<label>.log``; gone when the block is left."""
        log = self.store.root / "logs" / "wheels" / f"{label}.log"
        with self.store.staging(label) as folder:
            context = run_context(Context(site=self.site, store=self.store, reporter=self.reporter))
            yield LockContext(**vars(context), folder=folder, log=log)

    def archive(self, origin: SourceOrigin) -> bytes:
        """The sources, as an archive with one folder on top.

        Raises:
            CheckRefusedError: the index has another file of that name and version.
            NetworkError: they cannot be fetched.
        """
        if origin.commit:
            return archive_of_commit(origin.package, origin.git, origin.commit, self.store)
        return self.sdist(origin.package, origin.version, origin.sdist, origin.index)

    def build_requires(self, origin: SourceOrigin) -> tuple[str, ...]:
        """What the sources declare to be built with, as PEP 508 lines (PEP 518)."""

        def declaring() -> bytes:
            archive = self.archive(origin)
            return only_folder(archive, origin.subdirectory) if origin.subdirectory else archive

        # One commit may hold several packages, with a pyproject.toml each: the folder is part of the identity.
        identity = digest_of({"commit": origin.commit}) if origin.commit else origin.sdist
        if origin.subdirectory:
            identity = digest_of({"commit": origin.commit, "subdirectory": origin.subdirectory})
        files = kept_declarations(origin.package, identity, declaring, self.store)
        try:
            return build_requires(files[PYPROJECT].decode() if PYPROJECT in files else None)
        except ValueError as error:
            raise CheckRefusedError(
                f"the sources of {origin.package} {origin.version} cannot be built",
                why=f"Their pyproject.toml cannot be read: {error}",
                fix="Choose another version of the component and lock again.",
            ) from error


def _other(name: str, version: str, locked: str, built: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"the sdist of {name} {version} is not the one that was locked",
        why=f"Locked {locked}, the index has {built}.",
        fix="Find out who changed it; if the change is wanted, lock again with --upgrade.",
    )
