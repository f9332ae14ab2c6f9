"""The record of the faults: which check found each of them, and how far healthy repeats are apart.

An existing record goes on: what this session tried anew replaces its earlier entries, and each entry has the commit
that it is of. So a part of the faults can be run again, and several workers (``-n``) write one record.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from faults.environments import Environment
from faults.kinds import Fault

from envbuild import __version__
from envbuild.core import locks
from envbuild.core.files import write_atomic

VARIABLE = "ENVBUILD_SOAK_RECORD"
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "megatron-core", "numpy", "psutil")


class Record:
    """What was found, by fault; in the file that the variable names, if it names one."""

    def __init__(self, stack: Environment) -> None:
        self._stack = stack
        self._file = Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
        self._commit = commit()
        self._faults: dict[str, dict[str, Any]] = {}
        self._repeats: dict[str, Any] | None = None
        before = self._read()
        if before is not None:
            assert (before["versions"], before["machine"]) == (versions(self._stack), machine()), (
                "another machine's record"
            )

    def add(self, fault: Fault, *, caught: bool, checks: list[str], seconds: float) -> None:
        """Note what became of a fault."""
        self._faults[fault.id] = {
            "id": fault.id,
            "broken": fault.broken,
            "where": fault.where,
            "check": fault.check,
            "says": fault.text,
            "caught": caught,
            "found": checks,
            "seconds": round(seconds, 1),
            "commit": self._commit,
        }
        self._write()

    def add_repeats(self, repeats: dict[str, Any]) -> None:
        """Note how healthy repeats went."""
        self._repeats = {**repeats, "commit": self._commit}
        self._write()

    def _read(self) -> dict[str, Any] | None:
        """The record as it is now; other workers write to it too."""
        if self._file is None or not self._file.is_file():
            return None
        document: dict[str, Any] = json.loads(self._file.read_text())
        return document

    def _write(self) -> None:
        if self._file is None:
            return
        with locks.exclusive(Path(tempfile.gettempdir()) / f"envbuild-{self._file.name}.lock"):
            before = self._read() or {"faults": [], "repeats": None}
            faults = {entry["id"]: entry for entry in before["faults"]} | self._faults
            document = {
                "what": "planted faults and healthy repeats on the CPU (./dev soak tests/faults)",
                "versions": versions(self._stack),
                "machine": machine(),
                "faults": sorted(faults.values(), key=lambda entry: str(entry["id"])),
                "repeats": self._repeats or before["repeats"],
            }
            write_atomic(self._file, json.dumps(document, indent=2) + "\n")


def commit() -> str:
    """The commit of this checkout."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def versions(stack: Environment) -> dict[str, str]:
    """The versions of a stack's environment that decide what is measured."""
    installed = stack.versions
    packages = {name: installed[name] for name in PACKAGES if name in installed}
    return {"envbuild": __version__, "python": platform.python_version(), **packages}


def machine() -> dict[str, Any]:
    """The processor, its cores and the memory of this machine."""
    model = next(
        (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return {
        "cpu_model": model,
        "cpu_count": len(os.sched_getaffinity(0)),
        # Rounded: what a kernel keeps for itself differs by a page or two from one start to the next.
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
