"""Packages that are released together and belong together: one version of all of them, pinned from any side."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from packaging.version import Version

from envbuild.catalog import knowledge
from envbuild.core.errors import ResolutionError, UsageError
from envbuild.core.text import quoted_command
from envbuild.lock.components.models import Chosen, DecidedBy, Preference
from envbuild.lock.components.releases import EXACT
from envbuild.lock.uv.package_index import MOST_PASSED_OVER, PackageIndex

# Releases 0.0.x hold the names of these packages on the index and have nothing in them.
NO_PLACEHOLDER = ">=0.1"
_STRENGTH = (DecidedBy.PIN, DecidedBy.UPSTREAM, DecidedBy.TABLE, DecidedBy.DECLARED, DecidedBy.STACK)


def families() -> tuple[frozenset[str], ...]:
    """The families of ``envs/knowledge/packages.toml``."""
    return tuple(family.packages for family in knowledge.packages().families)


def family_of(package: str) -> frozenset[str]:
    """The packages that have one version with this one; itself, if no others do."""
    return next((family for family in families() if package in family), frozenset({package}))


def with_one_version(
    chosen: Mapping[str, Chosen], index: PackageIndex, preferences: Mapping[str, Preference]
) -> dict[str, Chosen]:
    """The components, with one version for the packages of a family.

    The newest that all of them have in every range of theirs; where there is none, in the range of the one that is
    decided best: by the user's pin, then by upstream, then by what others declare. Which it is must be known before the
    resolution, which cannot find out what a package of the compile phase declares.

    Raises:
        UsageError: two pins exclude each other.
    """
    by_name = dict(chosen)
    for family in families():
        members = {
            name: component
            for name, component in chosen.items()
            if name in family and not component.is_direct and name not in index.base.provides
        }
        if len(members) > 1 and not _are_one({component.specifier for component in members.values()}):
            preferred = {name: preference.version for name, preference in preferences.items() if name in family}
            with index.context.reporter.step(f"find one version of {', '.join(members)}"):
                by_name |= _one_version(members, index, preferred)
    return by_name


def _are_one(specifiers: Collection[str]) -> bool:
    return len(specifiers) == 1 and EXACT.match(min(specifiers)) is not None


def _one_version(members: Mapping[str, Chosen], index: PackageIndex, preferred: Mapping[str, str]) -> dict[str, Chosen]:
    best = min(members.values(), key=lambda member: _STRENGTH.index(member.origin))
    strong = [component for component in members.values() if component.origin is best.origin]
    for deciding in (list(members.values()), strong):
        specifier = ",".join(dict.fromkeys(member.specifier for member in deciding if member.specifier))
        version = _common(members, specifier, index, preferred)
        if version is not None:
            return {name: _at(component, version, best) for name, component in members.items()}
    ranges = {member.specifier for member in strong}
    if best.origin is DecidedBy.PIN and len(ranges) > 1:
        pins = ", ".join(f"{member.name}={member.asked}" for member in strong)
        raise UsageError(
            f"{pins} are pinned, and are released together",
            why="They work in one version only, and no release of all of them is in these ranges.",
            fix=f"Pin one of them: {quoted_command('--pin', f'{best.name}={best.asked}')}",
        )
    # There is no such release: the resolution says so, with what is near.
    return {name: component if component in strong else _follow(component, best) for name, component in members.items()}


def _common(members: Collection[str], specifier: str, index: PackageIndex, preferred: Mapping[str, str]) -> str | None:
    """The newest release in a range that all packages have; None: there is none."""
    limit = ",".join(filter(None, (specifier, NO_PLACEHOLDER)))
    for _ in range(MOST_PASSED_OVER):
        wanted = dict.fromkeys(members, limit)
        try:
            releases = index.find(wanted, f"find {', '.join(members)}", preferred=preferred)
        except ResolutionError:
            return None
        versions = {Version(releases[name].version) for name in members}
        if len(versions) == 1:
            return str(versions.pop())
        # Where no preference holds, each is the newest of its package: none above the lowest of them is common to all.
        limit = ",".join(filter(None, (specifier, NO_PLACEHOLDER, f"<={min(versions)}")))
    return None


def _at(component: Chosen, version: str, best: Chosen) -> Chosen:
    if Version(version) in component.range:
        return replace(component, version=version)
    return replace(_follow(component, best), version=version)


def _follow(component: Chosen, best: Chosen) -> Chosen:
    """A member that another one decides."""
    because = f"one version with {best.name} {best.asked} ({best.because}), instead of {component.asked}"
    return replace(
        component,
        asked=best.asked,
        specifier=best.specifier,
        origin=DecidedBy.DECLARED if best.origin is DecidedBy.PIN else best.origin,
        because=because,
        held_by=(best.name,),
    )
