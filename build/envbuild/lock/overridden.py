"""What overrides hide: versions outside the range that another locked package declares.

An override replaces what every package declares, and uv.lock says nothing of what was replaced. So uv itself is asked
again, without overrides: whether each package that needs an overridden one accepts the version that was locked. All
else is left out, so that the answer is about these declarations alone; it comes from the metadata that uv just read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomlkit
from packaging.specifiers import SpecifierSet

from envbuild.core.errors import ResolutionError
from envbuild.core.files import machine_errors
from envbuild.lock.checks import CheckFinding
from envbuild.lock.planning import Plan
from envbuild.lock.project import render_project, requirement_of
from envbuild.lock.resolve import Resolution, resolve
from envbuild.lock.workplace import Workplace

CODE = "override-range"
THE_STACK = "the stack"
# uv's word for a contradiction; other failures of the question are failures.
_NO_SOLUTION = "No solution found"


@dataclass(frozen=True, kw_only=True)
class Overridden:
    """A declaration that an override goes against.

    Attributes:
        by: whose override it is, in words.
        declared_by: the package (``lib 1.0``), or the stack itself.
        declared: the requirement as declared (``dep<2``).
        meant: the stack says that this package's declaration is wrong.
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
        return CheckFinding(code=CODE, what=self.text(), fix=fix)


def against_declarations(plan: Plan, resolution: Resolution, work: Workplace) -> tuple[Overridden, ...]:
    """Every declared range that a locked version is outside of, because an override hides it.

    What a component's upstream overrides of its own declarations is left out: both are its authors' words.
    """
    packages = [package for package in resolution.uv_lock["package"] if "virtual" not in package["source"]]
    names = {str(entry["name"]) for entry in resolution.uv_lock.get("manifest", {}).get("overrides", [])}
    locked = {name: resolution.pins[name] for name in sorted(names & set(resolution.pins))}
    if not locked:
        return ()
    found = _against_the_stack(plan, locked)
    needed = [
        _Need(package=package, name=name, extras=extras)
        for package in packages
        for name in locked
        if (extras := _extras_that_need(package, name)) is not None and not _own_override(plan, name, package)
    ]
    with work.reporter.step(f"check what {len(locked)} overrides go against"):
        if not needed or not _contradiction(plan, resolution, needed, work):
            return tuple(found)
        for need in needed:
            why = _contradiction(plan, resolution, [need], work)
            if why:
                version = locked[need.name]
                declared = f"{need.name}{_range(why, need.name, version)}"
                found.append(_overridden(plan, need.name, version, need.title, declared))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _Need:
    """A locked package (its table in uv.lock) that needs an overridden one, with the extras that do."""

    package: Mapping[str, Any]
    name: str
    extras: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.package['name']} {self.package.get('version', '')}".strip()


def _extras_that_need(package: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """The extras through which a package needs ``name``; none when it does without; None: it does not need it."""
    if any(edge["name"] == name for edge in package.get("dependencies", [])):
        return ()
    extras = [
        str(extra)
        for extra, edges in package.get("optional-dependencies", {}).items()
        if any(edge["name"] == name for edge in edges)
    ]
    return tuple(extras) or None


def _own_override(plan: Plan, name: str, package: Mapping[str, Any]) -> bool:
    return name not in plan.led.stack.overrides and (
        name in plan.upstream_overrides and plan.upstream_overrides[name].by == package["name"]
    )


def _against_the_stack(plan: Plan, locked: Mapping[str, str]) -> list[Overridden]:
    stated = {**{name: item.specifier for name, item in plan.project.chosen.items()}, **plan.project.requirements}
    return [
        _overridden(plan, name, version, THE_STACK, f"{name}{stated[name]}")
        for name, version in locked.items()
        if name in stated and not SpecifierSet(stated[name]).contains(version, prereleases=True)
    ]


def _overridden(plan: Plan, name: str, version: str, declared_by: str, declared: str) -> Overridden:
    own, forced = plan.led.stack.overrides.get(name), plan.upstream_overrides.get(name)
    if own is not None:
        by, meant = f"the stack ({own.reason})", declared_by.partition(" ")[0] in own.against
    else:
        by, meant = f"{forced.where} of {forced.by}" if forced is not None else "an override", False
    return Overridden(package=name, version=version, by=by, declared_by=declared_by, declared=declared, meant=meant)


def _contradiction(plan: Plan, resolution: Resolution, needs: Sequence[_Need], work: Workplace) -> str:
    """Uv's explanation why the needing packages do not accept the locked versions; empty: they do."""
    folder = work.folder / "overridden"
    with machine_errors(folder):
        folder.mkdir(exist_ok=True)
        (folder / "uv.lock").unlink(missing_ok=True)
        (folder / "pyproject.toml").write_text(_question(plan, resolution, needs))
    what = "check what overrides go against"
    try:
        resolve(folder, plan.torch, what, work.log, work.reporter.update)
    except ResolutionError as error:
        if _NO_SOLUTION not in error.why:
            raise
        return error.why
    return ""


def _question(plan: Plan, resolution: Resolution, needs: Sequence[_Need]) -> str:
    """The project that resolves if these packages accept the locked versions: no overrides, and nothing else."""
    chosen = {name: item for name, item in plan.project.chosen.items() if item.commit is not None}
    document = tomlkit.parse(render_project(plan.project, pins=resolution.pins, source=plan.torch)).unwrap()

    def line(name: str, version: str, extras: tuple[str, ...] = ()) -> str:
        item = chosen.get(name)
        return requirement_of(
            name,
            f"=={version}" if item is None or item.commit is None else f" @ git+{item.git}@{item.commit.sha}",
            extras,
        )

    wanted = {need.name: line(need.name, resolution.pins[need.name]) for need in needs}
    for need in needs:
        name = str(need.package["name"])
        extras = {extra for other in needs if other.package["name"] == name for extra in other.extras}
        wanted[name] = line(name, str(need.package.get("version", "")), tuple(sorted(extras)))
    settings = document["tool"]["uv"]
    # Without the project itself: excluded, it would need nothing at all.
    every = {str(package["name"]) for package in resolution.uv_lock["package"] if "virtual" not in package["source"]}
    left_out = every | set(plan.project.overrides) | set(settings.get("exclude-dependencies", ()))
    settings.pop("override-dependencies", None)
    settings["exclude-dependencies"] = sorted(left_out - set(wanted))
    settings["constraint-dependencies"] = [
        text for text in settings.get("constraint-dependencies", ()) if text.partition("==")[0] not in chosen
    ]
    document["project"].pop("optional-dependencies", None)
    document["project"]["dependencies"] = list(wanted.values())
    return tomlkit.dumps(document)


def _range(why: str, name: str, version: str) -> str:
    """The declared range in uv's explanation, which names the bound that the version is beyond."""
    text = " ".join(why.split())
    ranges = re.findall(rf"depends? on {re.escape(name)}(?:\{{[^}}]*\}})?([<>=!~][^\s]*?),?(?: |$)", text)
    found = [text for text in ranges if text != f"=={version}"]
    # uv lists a range with holes piece by piece.
    return found[0] if found and "one of:" not in text else " in another range"
