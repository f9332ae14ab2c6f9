"""What drivers train, measure, save and compare with, by the torch and the megatron-core of a stack."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


# A process for each file of checks: importing the stack takes longer than they do.
@pytest.mark.parametrize(
    "name",
    [
        "reference_checks",
        "rounding_checks",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bands_checks", "checkpoint_checks", "text_checks")),
    ],
)
def test_checks_hold(stack_python: Path, tmp_path: Path, name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "smoke"), "OMP_NUM_THREADS": "1"}
    command = [stack_python, "-W", "ignore", TESTS / "helpers" / f"{name}.py", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
