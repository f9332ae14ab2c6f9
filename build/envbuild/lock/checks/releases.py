"""Checks of the releases that were taken: yanked ones, placeholders, and families that fell apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.components.families import FAMILIES
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.uv.resolution import Resolution, package_files

# A release with files smaller than this holds a name: transformer-engine 0.0.0 has 1,097 bytes, its core 0.0.0a0 1,158.
SMALLEST_CONTENT = 4096


def check_releases(plan: LockPlan, resolution: Resolution) -> list[CheckFinding]:
    """Yanked releases and placeholders of components, and families of more than one version."""
    tables = resolution.tables
    findings = []
    for name in map(canonicalize_name, plan.project.chosen):
        if (table := tables.get(name)) is None:
            continue
        version = str(table.get("version", ""))
        # What a lock of the same moment has stays, though it was yanked since.
        if name in resolution.yanked and plan.keep.get(name) != version:
            findings.append(_yanked(name, version, resolution.yanked[name]))
        elif _is_placeholder(table):
            findings.append(_placeholder(name, version))
    return [*findings, *_families(tables)]


def _yanked(name: str, version: str, reason: str) -> CheckFinding:
    return CheckFinding(
        code="yanked",
        what=f"{name} {version} was yanked from the index: {reason}",
        fix=f"Take another release: --pin {name}=VERSION",
        packages=(name,),
    )


def _is_placeholder(table: Mapping[str, Any]) -> bool:
    sizes = [file["size"] for file in package_files(table) if "size" in file]
    return bool(sizes) and max(sizes) < SMALLEST_CONTENT and Version(table["version"]).release[:2] in ((0,), (0, 0))


def _placeholder(name: str, version: str) -> CheckFinding:
    return CheckFinding(
        code="placeholder",
        what=f"{name} {version} holds a name on the index and has no content",
        fix=f"No release with content resolves with the rest. Pin one to see why: --pin {name}=VERSION",
        packages=(name,),
    )


def _families(tables: Mapping[str, Mapping[str, Any]]) -> list[CheckFinding]:
    findings = []
    for family in FAMILIES:
        versions = {name: str(tables[name]["version"]) for name in sorted(family) if "version" in tables.get(name, {})}
        if len({Version(version).public for version in versions.values()}) > 1:
            findings.append(
                CheckFinding(
                    code="one-version",
                    what=f"{', '.join(f'{name} {version}' for name, version in versions.items())}: they work together "
                    "in one version only",
                    fix="Pin one of them; the others follow.",
                    packages=tuple(versions),
                )
            )
    return findings
