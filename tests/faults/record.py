"""The record of a run of the faults: which check found each of them, and how far healthy repeats are apart."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.environments import Environment
from faults.kinds import Fault

from envbuild import __version__

VARIABLE = "ENVBUILD_SOAK_RECORD"
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "megatron-core", "numpy", "psutil")


@dataclass
class Record:
    """What a session found."""

    stack: Environment
    faults: list[dict[str, Any]] = field(default_factory=list)
    repeats: dict[str, Any] | None = None

    def add(self, fault: Fault, *, caught: bool, checks: list[str], seconds: float) -> None:
        """Note what became of a fault."""
        self.faults.append(
            {
                "id": fault.id,
                "broken": fault.broken,
                "where": fault.where,
                "check": fault.check,
                "says": fault.says,
                "caught": caught,
                "found": checks,
                "seconds": round(seconds, 1),
            }
        )
        self.write()

    def write(self) -> None:
        """Write the record where the variable says, if it says so."""
        if target := os.environ.get(VARIABLE):
            Path(target).write_text(json.dumps(self.as_json(), indent=2) + "\n")

    def as_json(self) -> dict[str, Any]:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        versions = self.stack.versions
        return {
            "what": "planted faults and healthy repeats on the CPU (./dev soak)",
            "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
            "versions": {
                "envbuild": __version__,
                "python": platform.python_version(),
                **{name: versions[name] for name in PACKAGES if name in versions},
            },
            "machine": _machine(),
            "faults": sorted(self.faults, key=lambda item: item["id"]),
            "repeats": self.repeats,
        }


def _machine() -> dict[str, Any]:
    model = next(
        (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return {
        "cpu_model": model,
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
