"""The text that recipes train on, with the megatron-core of a stack."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_text_that_was_cut_short_or_does_not_fit_the_vocabulary_is_refused(stack_python: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "smoke"), "OMP_NUM_THREADS": "1"}
    command = [stack_python, TESTS / "helpers" / "text_checks.py", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
