"""Which release uv takes of a package by itself, and what is in it: asked before the whole is resolved."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime, timezone

from envbuild.catalog.catalog import Catalog
from envbuild.core.errors import CheckRefusedError, ConfigurationError, NetworkError, ResolutionError
from envbuild.core.text import quoted_command
from envbuild.git.refs import GitRef
from envbuild.lock.components.downloads import NOT_AN_ARCHIVE, archive_members, fetch_file
from envbuild.lock.components.models import Chosen, Companion, DecidedBy, Lead
from envbuild.lock.context import LockContext
from envbuild.lock.inputs.pins import GIT_PREFIX, parse_ref
from envbuild.lock.inputs.request import NoReleaseError
from envbuild.lock.uv.explanation import needed_pythons, not_there
from envbuild.lock.uv.package_index import PackageIndex
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX_BUILD
from envbuild.lock.uv_lock import ResolvedPackage

# One release, and which.
EXACT = re.compile(r"^==\s*([^*,\s]+)$")


def find_release(chosen: Chosen, index: PackageIndex) -> ResolvedPackage:
    """The release that uv takes of a component by itself.

    Raises:
        ResolutionError: there is none; says which are near, and whether a tag was meant.
    """
    try:
        return index.find({chosen.name: chosen.specifier}, f"find {chosen.name}")[chosen.name]
    except ResolutionError as error:
        # One that does not exist, as opposed to one that does not fit.
        if chosen.name not in not_there(error.why) and not needed_pythons(error.why):
            raise
        raise _no_release(chosen, index, error) from error


def refuse_missing_pins(chosen: Mapping[str, Chosen], torch_build: str, index: PackageIndex) -> None:
    """Refuse a release that the user pinned and the index does not have, before anything is resolved with it.

    Raises:
        NoReleaseError: names the releases next to it.
    """
    pinned = [
        component
        for component in chosen.values()
        if component.origin is DecidedBy.PIN
        and component.commit is None
        and component.name not in index.base.provides
        # Its named builds may be in the site's find-links alone.
        and (component.name != "torch" or torch_build == PACKAGE_INDEX_BUILD)
    ]
    if not pinned:
        return
    try:
        index.find({component.name: component.specifier for component in pinned}, "find the pinned releases")
    except ResolutionError as error:
        missing = set(not_there(error.why))
        for component in pinned:
            if component.name in missing or needed_pythons(error.why):
                find_release(component, index)


def _no_release(chosen: Chosen, index: PackageIndex, error: ResolutionError) -> ResolutionError:
    exact = EXACT.match(chosen.specifier)
    version = exact[1] if exact else ""
    next_to_it = [("the newest before it", f"<{version}", index), ("the first after it", f">{version}", index.lowest())]
    by_name: dict[str, str] = {}
    for label, specifier, asked in (*next_to_it * bool(version), ("the newest of all", "", index)):
        if (near := asked.version(chosen.name, specifier)) is not None:
            by_name.setdefault(near, label)
    tags: list[str] = []
    if chosen.spec.git is not None and version:
        with contextlib.suppress(NetworkError):
            tags = index.context.repositories.open(chosen.spec.git).tags_of(version)
    newest = index.settings.get("exclude-newer")
    near_by = ", ".join(f"{release} ({label})" for release, label in by_name.items())
    why = f"Releases for the base's Python: {near_by}." if near_by else "It has no release for the base's Python."
    fix = (
        f"Pin one of these: --pin {chosen.name}=VERSION."
        if near_by
        else "Pin another component, or choose another base."
    )
    if tags:
        why += f"\n{chosen.spec.git} has the tag{'s' if len(tags) > 1 else ''} {', '.join(tags)}."
        tag = tags[0] if isinstance(parse_ref(tags[0]), GitRef) else f"{GIT_PREFIX}{tags[0]}"
        fix = f"Take the tag: {quoted_command('--pin', f'{chosen.name}={tag}')}. Or a release: {fix}"
    needed = " or ".join(needed_pythons(error.why))
    kind: type[ResolutionError] = NoReleaseError
    what = f"there is no release {version or chosen.specifier} of {chosen.name}"
    if needed:
        kind, what = ResolutionError, f"{chosen.title} needs Python {needed}; the base has {index.base.python.version}"
        fix += " Or choose a base with such a Python."
    missing = kind(
        what + (f" as of {newest}" if newest and not needed else ""),
        why=f"{why}\n{error.why}",
        fix=fix,
        log=error.log,
    )
    missing.nearest_pins = {chosen.name: next(iter(by_name))} if by_name else {}
    return missing


def release_lead(chosen: Chosen, catalog: Catalog, undecided: Collection[str], index: PackageIndex) -> Lead:
    """A component that is a release, with what a table in envs/ says of it.

    A range of releases is held to those that the table's entry is for, so that both stay together.

    Args:
        undecided: the components of which only a table could say something; without any, nothing is asked.
    """
    table = catalog.companions(chosen.name)
    if table is None or not table.names() & {*undecided}:
        return Lead(chosen=chosen, companions={})
    with index.context.reporter.step(f"look at {chosen.name} {chosen.asked}"):
        entry = table.for_release(find_release(chosen, index).version)
    if entry is None:
        return Lead(chosen=chosen, companions={})
    where = f"envs/companions/{chosen.name}.toml"
    named = {name: Companion(package=name, where=where, specifier=text) for name, text in entry.components.items()}
    if not chosen.specifier.startswith("==") or "*" in chosen.specifier:
        chosen = replace(chosen, specifier=",".join(filter(None, (chosen.specifier, entry.versions))))
    return Lead(chosen=chosen, companions=named, origin=DecidedBy.TABLE)


def uploaded_at(package: ResolvedPackage) -> datetime:
    """When a release was uploaded to the index: the first of its files.

    Raises:
        ConfigurationError: the index does not say.
    """
    # Indexes have upload times since PEP 700, and in JSON alone: GitLab's has none (gitlab-org/gitlab#581770).
    times = package.upload_seconds
    if not times:
        raise ConfigurationError(
            f"the index does not say when {package.title} was uploaded",
            why="Its answers carry no upload times, so 'release' has no date to count from.",
            fix="Name the date yourself: --as-of YYYY-MM-DD. Where the index has no times at all, take what there is "
            "now: --no-as-of",
        )
    return datetime.fromtimestamp(min(times), timezone.utc)


def release_has_folder(package: ResolvedPackage, folder: str, context: LockContext) -> bool:
    """Whether a release has files below ``folder`` (``nemo/collections/llm``): its first wheel, else its sdist.

    Raises:
        NetworkError: the file cannot be downloaded.
        CheckRefusedError: it is not an archive.
    """
    if not package.files:
        return False
    content, _ = fetch_file(package.files[0], package.title, context)
    prefix = f"{folder.strip('/')}/"
    try:
        names = [name for name, _ in archive_members(content)]
    except NOT_AN_ARCHIVE as error:
        raise CheckRefusedError(
            f"the file of {package.title} cannot be read",
            why=f"It is not an archive: {error}",
            fix="Try again; if it stays, the index or a proxy serves another file. Or choose another version.",
        ) from error
    if package.wheels:
        return any(name.startswith(prefix) for name in names)
    # An sdist has one folder on top, and sources below src/ now and then.
    inside = [name.partition("/")[2].removeprefix("src/") for name in names]
    return any(name.startswith(prefix) for name in inside)
