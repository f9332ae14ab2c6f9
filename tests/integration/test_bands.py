"""What bands are measured with, with the torch and the megatron-core of a stack."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CHECKS = TESTS / "helpers" / "bands_checks.py"


@pytest.mark.parametrize(
    "check",
    [
        "weights_move_by_one_unit_in_the_last_place",
        "bits_are_those_of_the_matrix_products",
        "largest_difference_is_relative_to_each_tensor",
        "numbers_do_not_depend_on_the_shards",
        "projections_are_as_far_apart_as_gradients",
    ],
)
def test_bands(stack_python: Path, check: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "smoke"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([stack_python, CHECKS, check], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
