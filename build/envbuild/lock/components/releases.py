"""Which release uv takes of a package by itself, and what is in it: asked before the whole is resolved."""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.models import Base
from envbuild.core.errors import CheckRefusedError, ConfigurationError, NetworkError, ResolutionError
from envbuild.git.refs import GitRef
from envbuild.lock.components.models import Chosen, Companion, DecidedBy, Lead
from envbuild.lock.components.sdist_metadata import fetch_file
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.inputs import as_of as asof
from envbuild.lock.inputs.refs import GIT_PREFIX, parse_ref
from envbuild.lock.project.pyproject import Project
from envbuild.lock.uv.lookup import look_up
from envbuild.lock.uv.resolution import seconds_of

# One release, and which.
EXACT = re.compile(r"^==\s*([^*,\s]+)$")


def likely(
    project: Project, names: Sequence[str], keep: Mapping[str, str], what: str, work: LockContext
) -> dict[str, Mapping[str, Any]]:
    """The releases of components that a lock takes if nothing else holds them back, as uv.lock's tables by name.

    Args:
        names: components from the index.
        keep: versions that are going to be kept.
    """
    wanted = {name: f"=={keep[name]}" if name in keep else project.chosen[name].specifier for name in names}
    dates = {
        name: asof.timestamp(asof.end_of(day))
        for name in names
        if (own := project.chosen[name].spec.as_of) and (day := asof.parse_date(own))
    }
    settings = {"exclude-newer": project.as_of, "exclude-newer-package": dates}
    return look_up(wanted, project.base, settings, what, work)


def find_release(
    chosen: Chosen, base: Base, settings: Mapping[str, object], work: LockContext, repositories: Repositories
) -> Mapping[str, Any]:
    """The release that uv takes of a component by itself, as uv.lock's table.

    Args:
        settings: keys of ``[tool.uv]`` besides the base's limits.

    Raises:
        ResolutionError: there is none; says which are near, and whether a tag was meant.
    """
    try:
        locked = look_up({chosen.name: chosen.specifier}, base, settings, f"find {chosen.name}", work)
    except ResolutionError as error:
        exact = EXACT.match(chosen.specifier)
        if exact is None or "there is no version of" not in error.why:
            raise
        raise _no_release(chosen, exact[1], base, settings, work, repositories, error) from error
    return locked[canonicalize_name(chosen.name)]


def _no_release(
    chosen: Chosen,
    version: str,
    base: Base,
    settings: Mapping[str, object],
    work: LockContext,
    repositories: Repositories,
    error: ResolutionError,
) -> ResolutionError:
    found: dict[str, str] = {}
    for words, specifier in (("the newest before it", f"<{version}"), ("the newest of all", "")):
        with contextlib.suppress(ResolutionError):
            near = look_up({chosen.name: specifier}, base, settings, f"find {chosen.name} {specifier}", work)
            found.setdefault(str(near[canonicalize_name(chosen.name)]["version"]), words)
    tags: list[str] = []
    if chosen.spec.git is not None:
        with contextlib.suppress(NetworkError):
            tags = repositories.at(chosen.spec.git).tags_of(version)
    newest = settings.get("exclude-newer")
    told = ", ".join(f"{release} ({words})" for release, words in found.items())
    why = f"Releases for the base's Python: {told}." if told else "It has no release for the base's Python."
    fix = (
        f"Pin one of these: --pin {chosen.name}=VERSION." if told else "Pin another component, or choose another base."
    )
    if tags:
        why += f"\n{chosen.spec.git} has the tag{'s' if len(tags) > 1 else ''} {', '.join(tags)}."
        tag = f"{GIT_PREFIX}{tags[0]}" if _is_version(tags[0]) else tags[0]
        fix = f"Take the tag: --pin {chosen.name}={tag}. Or a release: {fix}"
    return ResolutionError(
        f"there is no release {version} of {chosen.name}" + (f" as of {newest}" if newest else ""),
        why=f"{why}\n{error.why}",
        fix=fix,
        log=error.log,
    )


def _is_version(tag: str) -> bool:
    return not isinstance(parse_ref(tag), GitRef)


class Releases:
    """What is known of components that are releases: which one uv takes as of a moment, and what belongs to it.

    Args:
        undecided: the components of which only a table could say something; without any, nothing is asked.
    """

    def __init__(
        self,
        catalog: Catalog,
        base: Base,
        as_of: str,
        dates: Mapping[str, str],
        undecided: set[str],
        work: LockContext,
        repositories: Repositories,
    ) -> None:
        self._catalog = catalog
        self._base = base
        self._settings = {"exclude-newer": as_of, "exclude-newer-package": dict(dates)}
        self._undecided = undecided
        self._work = work
        self._repositories = repositories
        self._found: dict[str, Mapping[str, Any]] = {}

    def _package(self, chosen: Chosen) -> Mapping[str, Any]:
        if chosen.name not in self._found:
            with self._work.reporter.step(f"look at {chosen.name} {chosen.asked}"):
                self._found[chosen.name] = find_release(
                    chosen, self._base, self._settings, self._work, self._repositories
                )
        return self._found[chosen.name]

    def has_folder(self, chosen: Chosen, folder: str) -> bool:
        """Whether the release has files below ``folder``."""
        return has_folder(self._package(chosen), folder, self._work)

    def lead(self, chosen: Chosen) -> Lead:
        """What a table in envs/ says of the release.

        A range of releases is held to those that the table's entry is for, so that both stay together.
        """
        table = self._catalog.companions(canonicalize_name(chosen.name))
        if table is None or not table.names() & self._undecided:
            return Lead(chosen=chosen, companions={})
        entry = table.of(str(self._package(chosen)["version"]))
        if entry is None:
            return Lead(chosen=chosen, companions={})
        where = f"envs/companions/{canonicalize_name(chosen.name)}.toml"
        found = {name: Companion(package=name, where=where, specifier=text) for name, text in entry.components.items()}
        if not chosen.specifier.startswith("==") or "*" in chosen.specifier:
            chosen = replace(chosen, specifier=",".join(filter(None, (chosen.specifier, entry.versions))))
        return Lead(chosen=chosen, companions=found, origin=DecidedBy.TABLE)


def uploaded_at(package: Mapping[str, Any]) -> datetime:
    """When a release was uploaded to the index: the first of its files.

    Args:
        package: its ``[[package]]`` table of a uv.lock.

    Raises:
        ConfigurationError: the index does not say.
    """
    files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    times = [seconds_of(file["upload-time"]) for file in files if "upload-time" in file]
    if not times:
        raise ConfigurationError(
            f"the index does not say when {package['name']} {package['version']} was uploaded",
            why="Its answers carry no upload times, so 'release' has no date to count from.",
            fix="Name the date yourself: --as-of YYYY-MM-DD",
        )
    return datetime.fromtimestamp(min(times), timezone.utc)


def has_folder(package: Mapping[str, Any], folder: str, work: LockContext) -> bool:
    """Whether a release has files below ``folder`` (``nemo/collections/llm``): its first wheel, else its sdist.

    Raises:
        NetworkError: the file cannot be downloaded.
        CheckRefusedError: it is no archive.
    """
    title = f"{package['name']} {package['version']}"
    files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    if not files:
        return False
    content, _ = fetch_file(files[0], title, work.folder, work.site, work.store)
    prefix = f"{folder.strip('/')}/"
    try:
        if content[:2] == b"PK":
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                names = archive.namelist()
            if "wheels" in package:
                return any(name.startswith(prefix) for name in names)
        else:
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:*") as tar:
                names = tar.getnames()
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise CheckRefusedError(
            f"the file of {title} cannot be read",
            why=f"It is no archive: {error}",
            fix="Try again; if it stays, the index or a proxy serves another file. Or choose another version.",
        ) from error
    # An sdist has one folder on top, and sources below src/ now and then.
    inside = [name.partition("/")[2].removeprefix("src/") for name in names]
    return any(name.startswith(prefix) for name in inside)
