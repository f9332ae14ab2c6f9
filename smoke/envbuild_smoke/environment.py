"""What the environment under test consists of, and where it differs from what the lock says."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from envbuild_smoke import redirect_cpu
from envbuild_smoke.plan import Device

# Import names whose files are put on record: they tell an environment from the host's packages behind it.
MODULES = {"torch": "torch", "megatron.core": "megatron-core"}


def describe(device: Device, imported: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return the environment as one JSON object; `imported` is what the template process reported."""
    files = {name: find_file(name) for name in MODULES}
    # What was really imported counts for more than what would be.
    files.update({name: module["file"] for name, module in (imported or {}).items() if module["file"]})
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "versions": {name: found[0] for name, found in distributions().items()},
        "files": files,
        "device": device,
        "gpus": gpus() if device == "cuda" else [],
        "cuda_redirects": [redirect.symbol for redirect in redirect_cpu.PATCHED] if device == "cpu" else [],
    }


def distributions() -> dict[str, list[str]]:
    """Return each installed distribution's versions by normalized name, the one in effect first."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
        # A package that was removed halfway leaves a directory without these behind.
        if name and version:
            found.setdefault(normalize(name), []).append(version)
    return dict(sorted(found.items()))


def find_file(module: str) -> str | None:
    """Return the file a module would be imported from, without importing it; None if there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None


def gpus() -> list[dict[str, str]]:
    """Return name, memory and driver of each GPU as nvidia-smi prints them; empty without nvidia-smi."""
    # Not through torch: the runner would have to import it, and CUDA would hold memory on every GPU.
    fields = "name,memory.total,driver_version"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    return [{"name": row[0], "memory": row[1], "driver": row[2]} for row in rows if len(row) == 3]


def findings(
    expected: Mapping[str, str],
    imported: Mapping[str, Mapping[str, Any]],
    installed: Mapping[str, list[str]] | None = None,
) -> list[dict[str, str | None]]:
    """Compare the environment with the lock's versions.

    Codes: `package-missing`, `version-mismatch` (metadata against the lock), `package-twice` (two copies of
    a locked package on the path), `imported-version-differs` (the module that was really imported).
    """
    found = distributions() if installed is None else installed
    result: list[dict[str, str | None]] = []

    def add(code: str, package: str, wanted: str | None, seen: str | None) -> None:
        result.append({"code": code, "package": package, "expected": wanted, "found": seen})

    for package, version in expected.items():
        # Exact, with the local part: 2.13.0+cpu and 2.13.0+cu130 are different builds.
        versions = found.get(normalize(package), [])
        if not versions:
            add("package-missing", package, version, None)
            continue
        if versions[0] != version:
            add("version-mismatch", package, version, versions[0])
        if len(versions) > 1:
            add("package-twice", package, version, ", ".join(versions))
    for module, package in MODULES.items():
        seen = imported.get(module, {}).get("version")
        wanted = next((v for name, v in expected.items() if normalize(name) == package), None)
        # Modules often leave out the local part ("+cpu"), or carry one that the metadata lacks.
        if seen and wanted and _public(seen) != _public(wanted):
            add("imported-version-differs", package, wanted, seen)
    return result


def normalize(name: str) -> str:
    """Return a distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _public(version: str) -> str:
    return version.partition("+")[0]
