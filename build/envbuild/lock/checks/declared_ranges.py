"""Locked versions that another package's declarations do not accept, which the resolution did not see.

Behind an override, or by a pin of the user: an override replaces what every package declares, and uv.lock says nothing
of what was replaced. So uv itself is asked again, without overrides: whether each package that needs an overridden one
accepts the version that was locked.

In the base: what it provides is excluded from the resolution, and then uv says nothing of who needs it, in which
version. So uv is asked again, with a wheel of nothing but its name and version in the place of each: first who needs
them, then whether each accepts that version.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.catalog.base import Base
from envbuild.core.files import machine_errors
from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.checks.rules import provided_version
from envbuild.lock.checks.uv_queries import contradicted, declared_range, needs_of
from envbuild.lock.components.declarations import Declared, declared_at_commit, declared_by_release
from envbuild.lock.components.models import Chosen, DecidedBy
from envbuild.lock.components.project_metadata import read_requirement
from envbuild.lock.context import LockContext
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import Project
from envbuild.lock.uv.resolution import Resolution, resolve, throw_away

THE_STACK = "the stack"
THE_PIN = "the user's pin"
READ_AHEAD = "what was declared by"
_OVERRIDES = "check what overrides go against"
_BASE = "check what packages declare about what the base brings"


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
    found = _against_the_stack(plan, {name: version for name, version in locked.items() if name in everywhere})
    needed = [
        need
        for need in needs_of(resolution.packages, list(locked))
        if need.name in scoped.get(str(need.package["name"]), ())
        or (need.name in everywhere and not _own_override(plan, need.name, need.package))
    ]
    with context.reporter.step(f"check what {len(locked)} overrides go against"):
        # uv.lock does not say what an override replaced, so uv resolves once more without any.
        for need, why in contradicted(plan, resolution, needed, context, _OVERRIDES):
            version = locked[need.name]
            declared = f"{need.name}{declared_range(why, need.name, version)}"
            found.append(_overridden(plan, need.name, version, need.title, declared))
    return tuple(found)


def _own_override(plan: LockPlan, name: str, package: Mapping[str, Any]) -> bool:
    return name not in plan.effective.stack.overrides and (
        name in plan.upstream_overrides and plan.upstream_overrides[name].by == package["name"]
    )


def _against_the_stack(plan: LockPlan, locked: Mapping[str, str]) -> list[Overridden]:
    stated = {**{name: item.specifier for name, item in plan.project.chosen.items()}, **plan.project.requirements}
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
    found: list[Overridden] = []
    for name, item in plan.project.chosen.items():
        moved = [used for used in item.spec.uses if _is_moved(plan, name, used)]
        if not moved:
            continue
        with context.reporter.step(f"check what {name} declares of {', '.join(moved)}"):
            declared = _declared(item, packages, plan.project.base, context)
        if declared is not None:
            found += [finding for used in moved if (finding := _outside(declared, used, resolution, plan)) is not None]
    return tuple(found)


def _is_moved(plan: LockPlan, name: str, used: str) -> bool:
    """Whether a pin or a declared range decides a component that another uses, and no override says more of it."""
    item = plan.project.chosen.get(used)
    overrides = {*plan.project.overrides, *plan.project.scoped_overrides.get(name, ())}
    return item is not None and item.origin in (DecidedBy.PIN, DecidedBy.DECLARED) and used not in overrides


def _declared(
    item: Chosen, packages: Mapping[str, Mapping[str, Any]], base: Base, context: LockContext
) -> Declared | None:
    if item.commit is not None:
        return declared_at_commit(item, context.repositories)
    package = packages.get(item.name)
    return None if package is None or item.url else declared_by_release(package, base, context)


def _outside(declared: Declared, used: str, resolution: Resolution, plan: LockPlan) -> Overridden | None:
    version = resolution.pins.get(used)
    ranges = [part for part in declared.of(used, plan.project.base) if part.specifier]
    # The ranges of several extras are alternatives: one that has the version is enough (Declared.of).
    if version is None or not ranges or any(part.has(version) for part in ranges):
        return None
    extras = [f" (extra {part.extra})" if part.extra else "" for part in ranges]
    item = plan.project.chosen[used]
    by = THE_PIN if item.origin is DecidedBy.PIN else f"what was {item.because.partition(',')[0]}"
    words = " or ".join(f"{used}{part.specifier}{extra}" for part, extra in zip(ranges, extras, strict=True))
    return Overridden(package=used, version=version, by=by, declared_by=declared.by, declared=words, meant=False)


def against_provided(plan: LockPlan, resolution: Resolution, context: LockContext) -> tuple[CheckFinding, ...]:
    """Every declared range that a version which the base brings is outside of."""
    base = plan.project.base
    if not base.provides:
        return ()
    with context.reporter.step(f"check what packages declare about {len(base.provides)} that the base brings"):
        found = [*_of_builds(plan.project)]
        wheels = _stand_ins(base, context.folder / "provided")
        needs = needs_of(_with_stand_ins(plan, resolution, wheels, context), list(wheels))
        for need, why in contradicted(plan, resolution, needs, context, _BASE, wheels):
            version = provided_version(base, need.name) or ""
            who = f"{need.title} declares {need.name}{declared_range(why, need.name, version)}"
            found.append(_finding(base, need.name, who, [str(need.package["name"])]))
    return tuple(found)


def _of_builds(project: Project) -> Iterable[CheckFinding]:
    """What the builds of the compile phase ask for, and the base brings in another version."""
    for line in project.build_requires:
        if (requirement := read_requirement(line)) is None:
            continue
        name = canonicalize_name(requirement.name)
        version = provided_version(project.base, name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            built = [item.name for item in project.metadata if line in item.build_requires]
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


def _stand_ins(base: Base, folder: Path) -> dict[str, str]:
    """A wheel for each package that the base brings, as requirements by name."""
    found: dict[str, str] = {}
    with machine_errors(folder):
        folder.mkdir(exist_ok=True)
        for name in base.provides:
            module, version = name.replace("-", "_"), provided_version(base, name)
            wheel, info = folder / f"{module}-{version}-py3-none-any.whl", f"{module}-{version}.dist-info"
            with zipfile.ZipFile(wheel, "w") as archive:
                # The three files that every wheel has ("Binary distribution format"); uv reads METADATA and builds
                # nothing.
                archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
                archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
                archive.writestr(f"{info}/RECORD", "")
            found[name] = f"{name} @ {wheel.absolute().as_uri()}"
    return found


def _with_stand_ins(
    plan: LockPlan, resolution: Resolution, wheels: Mapping[str, str], context: LockContext
) -> list[Mapping[str, Any]]:
    """The locked packages with what they need of the base, whatever version they ask for."""
    document = tomlkit.parse(plan.project_text(resolution.pins)).unwrap()
    settings = document["tool"]["uv"]
    settings["exclude-dependencies"] = []
    overrides = settings.get("override-dependencies", ())
    others = [line for line in overrides if canonicalize_name(Requirement(line).name) not in wheels]
    settings["override-dependencies"] = [*others, *wheels.values()]
    folder = throw_away(tomlkit.dumps(document), context)
    found = resolve(folder, plan.torch, _BASE, context, settings_may_be_ignored=True)
    return [package for package in found.packages if package["name"] not in wheels]
