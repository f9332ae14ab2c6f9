"""What locked packages declare about the packages that the base brings.

What a base provides is excluded from the resolution, and then uv says nothing of who needs it, in which version. So uv
is asked again, with a wheel of nothing but its name and version in the place of each: first who needs them, then
whether each accepts that version.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomlkit
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.catalog.models import Base
from envbuild.core.files import machine_errors
from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.checks.rules import provided_version
from envbuild.lock.checks.uv_queries import contradiction, declared_range, locked_packages, needs_of
from envbuild.lock.components.project_metadata import read_requirement
from envbuild.lock.context import LockContext
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import render_project
from envbuild.lock.uv.resolution import Resolution, resolve

CODE = "base-provides"
_WHAT = "check what packages declare about what the base brings"


def against_provided(plan: LockPlan, resolution: Resolution, context: LockContext) -> tuple[CheckFinding, ...]:
    """Every declared range that a version which the base brings is outside of."""
    base = plan.project.base
    if not base.provides:
        return ()
    with context.reporter.step(f"check what packages declare about {len(base.provides)} that the base brings"):
        found = [*_of_builds(plan.project.build_requires, base)]
        wheels = _stand_ins(base, context.folder / "provided")
        needs = needs_of(_with_stand_ins(plan, resolution, wheels, context), list(wheels))
        if needs and contradiction(plan, resolution, needs, context, _WHAT, wheels):
            for need in needs:
                if why := contradiction(plan, resolution, [need], context, _WHAT, wheels):
                    version = provided_version(base, need.name) or ""
                    who = f"{need.title} declares {need.name}{declared_range(why, need.name, version)}"
                    found.append(_finding(base, need.name, who, str(need.package["name"])))
    return tuple(found)


def _of_builds(lines: Iterable[str], base: Base) -> Iterable[CheckFinding]:
    """What the builds of the compile phase ask for, and the base brings in another version."""
    for line in lines:
        if (requirement := read_requirement(line)) is None:
            continue
        name = canonicalize_name(requirement.name)
        version = provided_version(base, name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield _finding(base, name, f"a build of the compile phase requires {line}", "what is built")


def _finding(base: Base, name: str, who: str, whose: str) -> CheckFinding:
    brought = {canonicalize_name(key): value for key, value in base.provides.items()}[canonicalize_name(name)]
    return CheckFinding(
        code=CODE,
        what=f"the base brings {name} {brought}, which no lock replaces, and {who}",
        fix=f"Choose a base that brings such a version, or another version of {whose}.",
    )


def _stand_ins(base: Base, folder: Path) -> dict[str, str]:
    """A wheel for each package that the base brings, as requirements by name."""
    found: dict[str, str] = {}
    with machine_errors(folder):
        folder.mkdir(exist_ok=True)
        for name in base.provides:
            module, version = canonicalize_name(name).replace("-", "_"), provided_version(base, name)
            wheel, info = folder / f"{module}-{version}-py3-none-any.whl", f"{module}-{version}.dist-info"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
                archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
                archive.writestr(f"{info}/RECORD", "")
            found[canonicalize_name(name)] = f"{name} @ {wheel.absolute().as_uri()}"
    return found


def _with_stand_ins(
    plan: LockPlan, resolution: Resolution, wheels: Mapping[str, str], context: LockContext
) -> list[Mapping[str, Any]]:
    """The locked packages with what they need of the base, whatever version they ask for."""
    document = tomlkit.parse(render_project(plan.project, pins=resolution.pins, source=plan.torch)).unwrap()
    settings = document["tool"]["uv"]
    settings["exclude-dependencies"] = []
    others = [line for line in settings.get("override-dependencies", ()) if _name(line) not in wheels]
    settings["override-dependencies"] = [*others, *wheels.values()]
    folder = context.folder / "needs"
    with machine_errors(folder):
        folder.mkdir(exist_ok=True)
        (folder / "pyproject.toml").write_text(tomlkit.dumps(document))
    found = resolve(folder, plan.torch, _WHAT, context, settings_may_be_ignored=True)
    return [package for package in locked_packages(found.uv_lock) if package["name"] not in wheels]


def _name(line: str) -> str:
    return canonicalize_name(Requirement(line).name)
