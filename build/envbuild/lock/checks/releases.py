"""Checks of the releases that were taken: yanked ones, placeholders, and families that fell apart."""

from __future__ import annotations

import re

from packaging.version import Version

from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.components.families import families
from envbuild.lock.components.placeholders import is_empty, is_stub
from envbuild.lock.context import LockContext
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.uv.resolution import Resolution
from envbuild.lock.uv_lock import Packages

# A day in the version: 2.11.0.dev20260105, 1.0a20260105.
_NIGHTLY = re.compile(r"(?:dev|a|b|rc|\+\D*)20\d{6}")


def check_releases(plan: LockPlan, resolution: Resolution, context: LockContext) -> list[CheckFinding]:
    """Yanked releases and placeholders of components, stubs of any package, and families of more than one version."""
    packages = resolution.packages
    findings = []
    for name in plan.project.chosen:
        if (release := packages.get(name)) is None:
            continue
        version = release.version
        # What a lock of the same moment has stays, though it was yanked since.
        if name in resolution.yanked and plan.keep.get(name) != version:
            findings.append(_yanked(name, version, resolution.yanked[name]))
        elif is_empty(release):
            findings.append(_placeholder(name, version, "holds a name on the index and has no content"))
    for name, release in packages.items():
        if "registry" in release.source and _NIGHTLY.search(release.version):
            findings.append(_nightly(name, release.version))
        if is_stub(release, context):
            what = "has no content: its build downloads a wheel from another index, of which the lock has no hash"
            findings.append(_placeholder(name, release.version, what))
    return [*findings, *_families(packages)]


def _yanked(name: str, version: str, reason: str) -> CheckFinding:
    return CheckFinding(
        code="yanked",
        what=f"{name} {version} was yanked from the index: {reason}",
        fix=f"Take another release: --pin {name}=VERSION",
        packages=(name,),
    )


def _nightly(name: str, version: str) -> CheckFinding:
    return CheckFinding(
        code="nightly",
        what=f"{name} {version} is a nightly build: many indexes drop those after weeks, and the lock with them",
        fix="Take a release, or keep the file at the site. envbuild lock --check --online says whether it is there.",
        packages=(name,),
        warning=True,
    )


def _placeholder(name: str, version: str, what: str) -> CheckFinding:
    return CheckFinding(
        code="placeholder",
        what=f"{name} {version} {what}",
        fix=f"No release with content resolves with the rest. Pin one to see why: --pin {name}=VERSION",
        packages=(name,),
    )


def _families(packages: Packages) -> list[CheckFinding]:
    findings = []
    for family in families():
        versions = {name: packages[name].version for name in sorted(family & packages.keys()) if packages[name].version}
        # A local label names a build (PEP 440): 2.11.0+c188b533 is one of 2.11.0.
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
