"""The check of saved initial weights, with the torch and the megatron-core of a stack."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CHECKS = TESTS / "helpers" / "checkpoint_checks.py"


@pytest.mark.slow
def test_checkpoints_that_are_not_what_was_saved_are_refused(stack_python: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "smoke"), "OMP_NUM_THREADS": "1"}
    # One process for all checks: importing the stack takes longer than they do.
    command = [stack_python, "-W", "ignore", CHECKS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
