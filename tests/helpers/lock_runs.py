"""What tests ask of `envbuild lock` runs: results, errors, the lock that came of it, and what a check refuses."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from helpers.stack_files import BASE, GPU_BASE, write_stack

from envbuild.lock.lockfile import read_lock
from envbuild.lock.models import Lock

FILES = ("main.txt", "compile.txt", "git.txt", "pyproject.toml", "stack.lock.toml")
ANY = "py3-none-any"
OLD = "2025-01-01T00:00:00Z"


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def error(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert "Traceback" not in done.stderr
    value: dict[str, Any] = json.loads(done.stdout)["error"]
    assert value["fix"]
    return value


def lock_of(tool: Any, name: str, base: str = BASE) -> Lock:
    return read_lock(tool.project / "lockfiles" / name / base).lock


def files_of(tool: Any, name: str, base: str = BASE) -> dict[str, str]:
    return {file: (tool.project / "lockfiles" / name / base / file).read_text() for file in FILES}


def check_stack(own: Any, **requirements: str) -> tuple[str, ...]:
    """A stack of `lib` and these packages on the base with CUDA 13.0 and glibc 2.35; the command that locks it."""
    needed = {name.replace("_", "-"): {"version": version, "reason": "a"} for name, version in requirements.items()}
    write_stack(own.project, "s", {"lib": {}}, target="gpu", base=GPU_BASE, requirements=needed)
    return ("lock", "--stack", "s", "--json")


def refused(own: Any, command: tuple[str, ...], code: str) -> str:
    """The lock is refused by this check alone, and let pass with its code; returns what was found."""
    refusal = error(own.run(*command, status=5))
    assert {line[1:].split(":")[0] for line in refusal["why"].splitlines() if line.startswith("[")} == {code}
    assert f"--allow {code}" in refusal["fix"]
    assert not (own.project / "lockfiles/s").exists()
    own.run(*command, "--allow", code)
    (allowed,) = {line.split(":")[0] for line in lock_of(own, "s", GPU_BASE).allowed}
    assert allowed == code
    why: str = refusal["why"]
    return why
