"""Which release uv takes of a package by itself, and what is in it: asked before the whole is resolved."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from envbuild.catalog.base import Base
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
from envbuild.lock.uv.named_index import LookUpRules
from envbuild.lock.uv.resolution import look_up, package_files, upload_seconds
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX_BUILD

# One release, and which.
EXACT = re.compile(r"^==\s*([^*,\s]+)$")


def find_release(chosen: Chosen, base: Base, rules: LookUpRules, context: LockContext) -> Mapping[str, Any]:
    """The release that uv takes of a component by itself, as uv.lock's table.

    Raises:
        ResolutionError: there is none; says which are near, and whether a tag was meant.
    """
    try:
        locked = look_up({chosen.name: chosen.specifier}, base, rules, f"find {chosen.name}", context)
    except ResolutionError as error:
        # One that does not exist, as opposed to one that does not fit.
        if chosen.name not in not_there(error.why) and not needed_pythons(error.why):
            raise
        exact = EXACT.match(chosen.specifier)
        raise _no_release(chosen, exact[1] if exact else "", base, rules, context, error) from error
    return locked[chosen.name]


def refuse_missing_pins(
    chosen: Mapping[str, Chosen], base: Base, torch_build: str, rules: LookUpRules, context: LockContext
) -> None:
    """Refuse a release that the user pinned and the index does not have, before anything is resolved with it.

    Raises:
        NoReleaseError: names the releases next to it.
    """
    pinned = [
        component
        for component in chosen.values()
        if component.origin is DecidedBy.PIN
        and component.commit is None
        and component.name not in base.provides
        # Its named builds may be in the site's find-links alone.
        and (component.name != "torch" or torch_build == PACKAGE_INDEX_BUILD)
    ]
    if not pinned:
        return
    try:
        look_up({item.name: item.specifier for item in pinned}, base, rules, "find the pinned releases", context)
    except ResolutionError as error:
        missing = set(not_there(error.why))
        for item in (item for item in pinned if item.name in missing or needed_pythons(error.why)):
            find_release(item, base, rules, context)


def _no_release(
    chosen: Chosen,
    version: str,
    base: Base,
    rules: LookUpRules,
    context: LockContext,
    error: ResolutionError,
) -> ResolutionError:
    by_name: dict[str, str] = {}
    lowest = rules.with_settings(resolution="lowest")
    for label, specifier, how in (
        *(
            [("the newest before it", f"<{version}", rules), ("the first after it", f">{version}", lowest)]
            * bool(version)
        ),
        ("the newest of all", "", rules),
    ):
        with contextlib.suppress(ResolutionError):
            near = look_up({chosen.name: specifier}, base, how, f"find {chosen.name} {specifier}", context)
            by_name.setdefault(str(near[chosen.name]["version"]), label)
    tags: list[str] = []
    if chosen.spec.git is not None and version:
        with contextlib.suppress(NetworkError):
            tags = context.repositories.at(chosen.spec.git).tags_of(version)
    newest = rules.settings.get("exclude-newer")
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
        kind, what = ResolutionError, f"{chosen.at()} needs Python {needed}; the base has {base.python.version}"
        fix += " Or choose a base with such a Python."
    missing = kind(
        what + (f" as of {newest}" if newest and not needed else ""),
        why=f"{why}\n{error.why}",
        fix=fix,
        log=error.log,
    )
    missing.nearest_pins = {chosen.name: next(iter(by_name))} if by_name else {}
    return missing


@dataclass(frozen=True, kw_only=True)
class Releases:
    """What is known of components that are releases: which one uv takes as of a moment, and what belongs to it.

    Attributes:
        rules: they hold the releases to the as-of moment.
        undecided: the components of which only a table could say something; without any, nothing is asked.
    """

    catalog: Catalog
    base: Base
    rules: LookUpRules
    undecided: frozenset[str]
    context: LockContext
    _found: dict[str, Mapping[str, Any]] = field(default_factory=dict, init=False)

    def _package(self, chosen: Chosen) -> Mapping[str, Any]:
        if chosen.name not in self._found:
            with self.context.reporter.step(f"look at {chosen.name} {chosen.asked}"):
                self._found[chosen.name] = find_release(chosen, self.base, self.rules, self.context)
        return self._found[chosen.name]

    def has_folder(self, chosen: Chosen, folder: str) -> bool:
        """Whether the release has files below ``folder``."""
        return release_has_folder(self._package(chosen), folder, self.context)

    def lead(self, chosen: Chosen) -> Lead:
        """What a table in envs/ says of the release.

        A range of releases is held to those that the table's entry is for, so that both stay together.
        """
        table = self.catalog.companions(chosen.name)
        if table is None or not table.names() & self.undecided:
            return Lead(chosen=chosen, companions={})
        entry = table.for_release(str(self._package(chosen)["version"]))
        if entry is None:
            return Lead(chosen=chosen, companions={})
        where = f"envs/companions/{chosen.name}.toml"
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
    # Indexes have upload times since PEP 700, and in JSON alone: GitLab's has none (gitlab-org/gitlab#581770).
    times = upload_seconds(package)
    if not times:
        raise ConfigurationError(
            f"the index does not say when {package['name']} {package['version']} was uploaded",
            why="Its answers carry no upload times, so 'release' has no date to count from.",
            fix="Name the date yourself: --as-of YYYY-MM-DD. Where the index has no times at all, take what there is "
            "now: --no-as-of",
        )
    return datetime.fromtimestamp(min(times), timezone.utc)


def release_has_folder(package: Mapping[str, Any], folder: str, context: LockContext) -> bool:
    """Whether a release has files below ``folder`` (``nemo/collections/llm``): its first wheel, else its sdist.

    Raises:
        NetworkError: the file cannot be downloaded.
        CheckRefusedError: it is not an archive.
    """
    title = f"{package['name']} {package['version']}"
    files = package_files(package)
    if not files:
        return False
    content, _ = fetch_file(files[0], title, context)
    prefix = f"{folder.strip('/')}/"
    try:
        names = [name for name, _ in archive_members(content)]
    except NOT_AN_ARCHIVE as error:
        raise CheckRefusedError(
            f"the file of {title} cannot be read",
            why=f"It is not an archive: {error}",
            fix="Try again; if it stays, the index or a proxy serves another file. Or choose another version.",
        ) from error
    if package.get("wheels"):
        return any(name.startswith(prefix) for name in names)
    # An sdist has one folder on top, and sources below src/ now and then.
    inside = [name.partition("/")[2].removeprefix("src/") for name in names]
    return any(name.startswith(prefix) for name in inside)
