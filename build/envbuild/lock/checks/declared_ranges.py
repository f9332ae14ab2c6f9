"""Locked versions that another package's declarations do not accept, which the resolution did not see.

Behind an override, or by a pin of the user: an override replaces what every package declares, and uv.lock says nothing
of what was replaced. And in the base: what it provides is excluded from the resolution. So the metadata of the locked
packages is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.catalog.base import Base
from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.checks.rules import provided_version
from envbuild.lock.components.declarations import Declared, declared_at_commit, declared_by_release
from envbuild.lock.components.models import Chosen, DecidedBy
from envbuild.lock.components.project_metadata import read_requirement
from envbuild.lock.components.sdist_metadata import DOWNLOADS_AT_ONCE
from envbuild.lock.context import LockContext
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import Project
from envbuild.lock.uv.cuda_packages import edges_of
from envbuild.lock.uv.resolution import Resolution

THE_STACK = "the stack"
THE_PIN = "the user's pin"
READ_AHEAD = "what was declared by"


@dataclass(frozen=True, kw_only=True)
class Overridden:
    """A declaration that an override goes against.

    Attributes:
        by: whose override it is, for people.
        declared_by: the package (``lib 1.0``), or the stack itself.
        declared: the requirement as declared (``dep<2``).
        meant: the stack says that this package's declaration is wrong, or upstream overrides it.
    """

    package: str
    version: str
    by: str
    declared_by: str
    declared: str
    meant: bool

    def text(self) -> str:
        """One line for the record."""
        return f"{self.declared_by} declares {self.declared}; {self.by} puts {self.package} {self.version} there"

    def finding(self) -> CheckFinding:
        """The finding that refuses it."""
        name = self.declared_by.partition(" ")[0]
        fix = f"Choose another version of {name} or {self.package}. If the declaration is known to be wrong, say so "
        fix += f'under [overrides.{self.package}] of the stack: its version, against = ["{name}"], and the reason.'
        if self.declared_by == THE_STACK:
            fix = "Make the stack's file say one thing: there, and under [overrides]."
        if self.by == THE_PIN:
            fix = f"Pin a {self.package} in that range, or another {name}."
        elif self.by.startswith(READ_AHEAD):
            fix = f"uv took another {name} than it takes by itself. Pin one release of it: --pin {name}=VERSION"
        packages = (self.package,) if self.declared_by == THE_STACK else (self.package, name)
        return CheckFinding(code="override-range", what=self.text(), fix=fix, packages=packages)


def against_declarations(plan: LockPlan, resolution: Resolution, context: LockContext) -> tuple[Overridden, ...]:
    """Every declared range that a locked version is outside of, because an override hides it.

    What a component's upstream overrides of its own declarations is left out: both are its authors' words.
    """
    # One that is for the declarations of a single package has no name of its own there.
    stated = resolution.uv_lock.get("manifest", {}).get("overrides", [])
    everywhere = {str(entry["name"]) for entry in stated if "name" in entry}
    scoped = plan.project.scoped_overrides
    names = everywhere.union(*scoped.values())
    locked = {name: resolution.pins[name] for name in sorted(names & set(resolution.pins))}
    if not locked:
        return ()
    listed = _against_the_stack(plan, {name: version for name, version in locked.items() if name in everywhere})
    asking = [
        package
        for package in resolution.packages
        if any(
            edge["name"] in locked and _is_overridden(plan, package, edge["name"], everywhere)
            for edge in edges_of(package)
        )
    ]
    with context.reporter.step(f"check what {len(locked)} overrides go against"):
        for unmet in _unmet(asking, locked, plan, resolution, context):
            if _is_overridden(plan, unmet.package, unmet.name, everywhere):
                declared = f"{unmet.name}{unmet.clauses}"
                listed.append(_overridden(plan, unmet.name, locked[unmet.name], unmet.title, declared))
    return tuple(listed)


def _is_overridden(plan: LockPlan, package: Mapping[str, Any], name: str, everywhere: Collection[str]) -> bool:
    """Whether an override replaces what a package declares of another, and is not one of its own authors."""
    if name in plan.project.scoped_overrides.get(str(package["name"]), ()):
        return True
    return name in everywhere and not _own_override(plan, name, package)


@dataclass(frozen=True, kw_only=True)
class _Unmet:
    """A declaration that a version is outside of: the clauses that do not have it, of a locked package's table."""

    package: Mapping[str, Any]
    name: str
    clauses: str

    @property
    def title(self) -> str:
        return f"{self.package['name']} {self.package.get('version', '')}".strip()


def _unmet(
    packages: Sequence[Mapping[str, Any]],
    versions: Mapping[str, str],
    plan: LockPlan,
    resolution: Resolution,
    context: LockContext,
) -> Iterator[_Unmet]:
    """What locked packages declare, for the extras that something asks for, and these versions do not meet."""
    base, quiet = plan.project.base, context.quiet()
    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
        read = [*pool.map(lambda package: _locked_declarations(package, plan, quiet), packages)]
    for package, declared in zip(packages, read, strict=True):
        if declared is None:
            context.reporter.note(f"note: what {package['name']} declares is known from its build alone: not checked")
    known = [(package, declared) for package, declared in zip(packages, read, strict=True) if declared is not None]
    extras = _asked_extras(known, plan, resolution)
    for package, declared in known:
        lines = declared.needed(base, extras[str(package["name"])])
        for name, version in versions.items():
            parts = {part for line in lines if canonicalize_name(line.name) == name for part in line.specifier}
            if unmet := sorted(str(part) for part in parts if not part.contains(version, prereleases=True)):
                yield _Unmet(package=package, name=name, clauses=",".join(unmet))


def _asked_extras(
    known: Sequence[tuple[Mapping[str, Any], Declared]], plan: LockPlan, resolution: Resolution
) -> Mapping[str, set[str]]:
    """The extras of each package that the project or a locked package asks for."""
    base = plan.project.base
    extras: defaultdict[str, set[str]] = defaultdict(set)
    for name, component in plan.project.every.items():
        extras[name].update(component.extras(base))
    for edge in (edge for package in resolution.uv_lock["package"] for edge in edges_of(package)):
        extras[str(edge["name"])].update(edge.get("extra", ()))
    # Of an extra that needs only what the base brings, uv.lock has nothing. What it asks for may ask for more.
    before, now = -1, 0
    while before != now:
        before = now
        for package, declared in known:
            for line in declared.needed(base, extras[str(package["name"])]):
                extras[canonicalize_name(line.name)].update(map(canonicalize_name, line.extras))
        now = sum(map(len, extras.values()))
    return extras


def _locked_declarations(package: Mapping[str, Any], plan: LockPlan, context: LockContext) -> Declared | None:
    name, version = str(package["name"]), str(package.get("version", ""))
    for metadata in plan.project.metadata:
        if metadata.name == name:
            return Declared(by=f"{name} {version}", lines=metadata.requires_dist, extras=metadata.provides_extra)
    component = plan.project.every.get(name)
    if component is not None and component.commit is not None:
        return declared_at_commit(component, context.repositories)
    return declared_by_release(package, plan.project.base, context)


def _own_override(plan: LockPlan, name: str, package: Mapping[str, Any]) -> bool:
    return name not in plan.effective.stack.overrides and (
        name in plan.upstream_overrides and plan.upstream_overrides[name].by == package["name"]
    )


def _against_the_stack(plan: LockPlan, locked: Mapping[str, str]) -> list[Overridden]:
    stated = {
        **{name: component.specifier for name, component in plan.project.chosen.items()},
        **plan.project.requirements,
    }
    return [
        _overridden(plan, name, version, THE_STACK, f"{name}{stated[name]}")
        for name, version in locked.items()
        if name in stated and not SpecifierSet(stated[name]).contains(version, prereleases=True)
    ]


def _overridden(plan: LockPlan, name: str, version: str, declared_by: str, declared: str) -> Overridden:
    own, forced = plan.effective.stack.overrides.get(name), plan.upstream_overrides.get(name)
    chosen = plan.project.chosen.get(name)
    # Upstream's own lock goes against those declarations too: that is what it has its overrides for.
    by, meant = "an override", declared_by != THE_STACK
    if own is not None:
        by, meant = f"the stack ({own.reason})", declared_by.partition(" ")[0] in own.against
    elif forced is not None:
        by = f"{forced.where} of {forced.by}"
    elif chosen is not None:
        by = chosen.because.partition(";")[0]
    return Overridden(package=name, version=version, by=by, declared_by=declared_by, declared=declared, meant=meant)


def against_ranges(plan: LockPlan, resolution: Resolution, context: LockContext) -> tuple[Overridden, ...]:
    """Every range that a component declares of one that it uses, for any of its extras, and that is not kept.

    uv holds a lock to the extras that the stack asks for, and to no others. A pin may be outside of such a range; and
    what is held to a range, where uv did not take the release of which that range was read.
    """
    packages = resolution.tables
    listed: list[Overridden] = []
    for name, component in plan.project.chosen.items():
        moved = [used for used in component.spec.uses if _is_moved(plan, name, used)]
        if not moved:
            continue
        with context.reporter.step(f"check what {name} declares of {', '.join(moved)}"):
            declared = _declared(component, packages, plan.project.base, context)
        if declared is not None:
            listed += [finding for used in moved if (finding := _outside(declared, used, resolution, plan)) is not None]
    return tuple(listed)


def _is_moved(plan: LockPlan, name: str, used: str) -> bool:
    """Whether a pin or a declared range decides a component that another uses, and no override says more of it."""
    component = plan.project.chosen.get(used)
    overrides = {*plan.project.overrides, *plan.project.scoped_overrides.get(name, ())}
    return component is not None and component.origin in (DecidedBy.PIN, DecidedBy.DECLARED) and used not in overrides


def _declared(
    component: Chosen, packages: Mapping[str, Mapping[str, Any]], base: Base, context: LockContext
) -> Declared | None:
    if component.commit is not None:
        return declared_at_commit(component, context.repositories)
    package = packages.get(component.name)
    return None if package is None or component.url else declared_by_release(package, base, context)


def _outside(declared: Declared, used: str, resolution: Resolution, plan: LockPlan) -> Overridden | None:
    version = resolution.pins.get(used)
    ranges = [part for part in declared.ranges(used, plan.project.base) if part.specifier]
    # The ranges of several extras are alternatives: one that has the version is enough (Declared.ranges).
    if version is None or not ranges or any(part.has(version) for part in ranges):
        return None
    extras = [f" (extra {part.extra})" if part.extra else "" for part in ranges]
    component = plan.project.chosen[used]
    by = THE_PIN if component.origin is DecidedBy.PIN else f"what was {component.because.partition(',')[0]}"
    words = " or ".join(f"{used}{part.specifier}{extra}" for part, extra in zip(ranges, extras, strict=True))
    return Overridden(package=used, version=version, by=by, declared_by=declared.by, declared=words, meant=False)


def against_provided(plan: LockPlan, resolution: Resolution, context: LockContext) -> tuple[CheckFinding, ...]:
    """Every declared range that a version which the base brings is outside of."""
    base = plan.project.base
    if not base.provides:
        return ()
    with context.reporter.step(f"check what packages declare about {len(base.provides)} that the base brings"):
        findings = [*_of_builds(plan.project)]
        versions = {name: provided_version(base, name) or "" for name in base.provides}
        for unmet in _unmet(resolution.packages, versions, plan, resolution, context):
            who = f"{unmet.title} declares {unmet.name}{unmet.clauses}"
            findings.append(_finding(base, unmet.name, who, [str(unmet.package["name"])]))
    return tuple(findings)


def _of_builds(project: Project) -> Iterable[CheckFinding]:
    """What the builds of the compile phase ask for, and the base brings in another version."""
    for line in project.build_requires:
        if (requirement := read_requirement(line)) is None:
            continue
        name = canonicalize_name(requirement.name)
        version = provided_version(project.base, name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            built = [declared.name for declared in project.metadata if line in declared.build_requires]
            yield _finding(project.base, name, f"a build of the compile phase requires {line}", built)


def _finding(base: Base, name: str, who: str, declarers: Sequence[str]) -> CheckFinding:
    others = " or ".join(declarers) or "what is built"
    return CheckFinding(
        code="base-provides",
        what=f"the base brings {name} {base.provides[name]}, which no lock replaces, and {who}",
        fix=f"Choose a base that brings such a version, or another version of {others}.",
        # What the base brings stays: only the others can be taken in another version.
        packages=tuple(declarers),
        subject=" ".join((name, *sorted(declarers))),
    )
