"""Locked versions that another package's declarations do not accept, which the resolution did not see.

Behind an override, or by a pin of the user: an override replaces what every package declares, and uv.lock says nothing
of what was replaced. And in the base: what it provides is excluded from the resolution. So the metadata of the locked
packages is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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
from envbuild.lock.uv.resolution import Resolution
from envbuild.lock.uv_lock import ResolvedPackage

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


@dataclass(frozen=True, kw_only=True)
class _Unmet:
    """A declaration that a version is outside of: the clauses that do not have it, of a locked package's table."""

    package: ResolvedPackage
    name: str
    clauses: str


class DeclaredRanges:
    """What the packages of one resolution declare, against the versions that were locked.

    What a component's upstream overrides of its own declarations is left out: both are its authors' words.
    """

    def __init__(self, plan: LockPlan, resolution: Resolution, context: LockContext) -> None:
        self._plan, self._resolution, self._context = plan, resolution, context
        self._project, self._base = plan.project, plan.project.base
        # One that is for the declarations of a single package has no name of its own there.
        self._everywhere = {override.name for override in resolution.uv_lock.manifest.overrides if override.name}

    def overridden(self) -> tuple[Overridden, ...]:
        """Every declared range that a locked version is outside of, because an override or a pin hides it."""
        return (*self._behind_overrides(), *self._behind_pins())

    def _behind_overrides(self) -> list[Overridden]:
        pins = self._resolution.pins
        names = self._everywhere.union(*self._project.scoped_overrides.values())
        locked = {name: pins[name] for name in sorted(names & set(pins))}
        if not locked:
            return []
        listed = self._against_the_stack({name: locked[name] for name in locked if name in self._everywhere})
        asking = [
            package
            for package in self._resolution.uv_lock.locked
            if any(needed.name in locked and self._is_overridden(package, needed.name) for needed in package.needs)
        ]
        with self._context.reporter.step(f"check what {len(locked)} overrides go against"):
            for unmet in self._unmet(asking, locked):
                if self._is_overridden(unmet.package, unmet.name):
                    declared = f"{unmet.name}{unmet.clauses}"
                    listed.append(self._overridden(unmet.name, locked[unmet.name], unmet.package.title, declared))
        return listed

    def _is_overridden(self, package: ResolvedPackage, name: str) -> bool:
        """Whether an override replaces what a package declares of another, and is not one of its own authors."""
        if name in self._project.scoped_overrides.get(package.name, ()):
            return True
        forced = self._plan.upstream_overrides.get(name)
        own = forced is not None and forced.by == package.name and name not in self._plan.effective.stack.overrides
        return name in self._everywhere and not own

    def _unmet(self, packages: Sequence[ResolvedPackage], versions: Mapping[str, str]) -> Iterator[_Unmet]:
        """What locked packages declare, for the extras that something asks for, and these versions do not meet."""
        quiet = self._context.quiet()
        with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
            read = [*pool.map(lambda package: self._locked_declarations(package, quiet), packages)]
        known = []
        for package, declared in zip(packages, read, strict=True):
            if declared is not None:
                known.append((package, declared))
                continue
            self._context.reporter.note(
                f"note: what {package.name} declares is known from its build alone: not checked"
            )
        extras = self._asked_extras(known)
        for package, declared in known:
            lines = declared.needed(self._base, extras[package.name])
            for name, version in versions.items():
                parts = {part for line in lines if canonicalize_name(line.name) == name for part in line.specifier}
                if unmet := sorted(str(part) for part in parts if not part.contains(version, prereleases=True)):
                    yield _Unmet(package=package, name=name, clauses=",".join(unmet))

    def _asked_extras(self, known: Sequence[tuple[ResolvedPackage, Declared]]) -> Mapping[str, set[str]]:
        """The extras of each package that the project or a locked package asks for."""
        extras: defaultdict[str, set[str]] = defaultdict(set)
        for name, component in self._project.every.items():
            extras[name].update(component.extras(self._base))
        for needed in (needed for package in self._resolution.uv_lock.packages for needed in package.needs):
            extras[needed.name].update(needed.extra)
        # Of an extra that needs only what the base brings, uv.lock has nothing. What it asks for may ask for more.
        before, now = -1, 0
        while before != now:
            before = now
            for package, declared in known:
                for line in declared.needed(self._base, extras[package.name]):
                    extras[canonicalize_name(line.name)].update(map(canonicalize_name, line.extras))
            now = sum(map(len, extras.values()))
        return extras

    def _locked_declarations(self, package: ResolvedPackage, context: LockContext) -> Declared | None:
        for metadata in self._project.metadata:
            if metadata.name == package.name:
                return Declared(by=package.title, lines=metadata.requires_dist, extras=metadata.provides_extra)
        component = self._project.every.get(package.name)
        if component is not None and component.commit is not None:
            return declared_at_commit(component, context.repositories) if component.commit.is_read else None
        return declared_by_release(package, self._base, context)

    def _against_the_stack(self, locked: Mapping[str, str]) -> list[Overridden]:
        stated = self._project.asked
        return [
            self._overridden(name, version, THE_STACK, f"{name}{stated[name]}")
            for name, version in locked.items()
            if name in stated and not SpecifierSet(stated[name]).contains(version, prereleases=True)
        ]

    def _overridden(self, name: str, version: str, declared_by: str, declared: str) -> Overridden:
        own, forced = self._plan.effective.stack.overrides.get(name), self._plan.upstream_overrides.get(name)
        chosen = self._project.chosen.get(name)
        # Upstream's own lock goes against those declarations too: that is what it has its overrides for.
        by, meant = "an override", declared_by != THE_STACK
        if own is not None:
            by, meant = f"the stack ({own.reason})", declared_by.partition(" ")[0] in own.against
        elif forced is not None:
            by = f"{forced.where} of {forced.by}"
        elif chosen is not None:
            by = chosen.because.partition(";")[0]
        return Overridden(package=name, version=version, by=by, declared_by=declared_by, declared=declared, meant=meant)

    def _behind_pins(self) -> Iterator[Overridden]:
        """Every range that a component declares of one that it uses, for any of its extras, and that is not kept.

        uv holds a lock to the extras that the stack asks for, and to no others. A pin may be outside of such a range;
        and what is held to a range, where uv did not take the release of which that range was read.
        """
        for name, component in self._project.chosen.items():
            moved = [used for used in component.spec.uses if self._is_moved(name, used)]
            if not moved:
                continue
            with self._context.reporter.step(f"check what {name} declares of {', '.join(moved)}"):
                declared = self._declared(component)
            if declared is not None:
                for used in moved:
                    yield from self._outside(declared, used)

    def _is_moved(self, name: str, used: str) -> bool:
        """Whether a pin or a declared range decides a component that another uses, and no override says more of it."""
        component = self._project.chosen.get(used)
        overrides = {*self._project.overrides, *self._project.scoped_overrides.get(name, ())}
        return (
            component is not None and component.origin in (DecidedBy.PIN, DecidedBy.DECLARED) and used not in overrides
        )

    def _declared(self, component: Chosen) -> Declared | None:
        if component.commit is not None:
            return declared_at_commit(component, self._context.repositories)
        package = self._resolution.packages.get(component.name)
        return None if package is None or component.url else declared_by_release(package, self._base, self._context)

    def _outside(self, declared: Declared, used: str) -> Iterator[Overridden]:
        version = self._resolution.pins.get(used)
        ranges = [part for part in declared.ranges(used, self._base) if part.specifier]
        # The ranges of several extras are alternatives: one that has the version is enough (Declared.ranges).
        if version is None or not ranges or any(part.has(version) for part in ranges):
            return
        component = self._project.chosen[used]
        by = THE_PIN if component.origin is DecidedBy.PIN else f"what was {component.because.partition(',')[0]}"
        words = " or ".join(
            f"{used}{part.specifier}" + (f" (extra {part.extra})" if part.extra else "") for part in ranges
        )
        yield Overridden(package=used, version=version, by=by, declared_by=declared.by, declared=words, meant=False)

    def against_provided(self) -> list[CheckFinding]:
        """Every declared range that a version which the base brings is outside of."""
        base = self._base
        if not base.provides:
            return []
        with self._context.reporter.step(
            f"check what packages declare about {len(base.provides)} that the base brings"
        ):
            findings = [*_of_builds(self._project)]
            versions = {name: provided_version(base, name) or "" for name in base.provides}
            for unmet in self._unmet(self._resolution.uv_lock.locked, versions):
                who = f"{unmet.package.title} declares {unmet.name}{unmet.clauses}"
                findings.append(_finding(base, unmet.name, who, [unmet.package.name]))
        return findings


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
