"""What bands are measured with, with the torch and the megatron-core of a stack."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CHECKS = TESTS / "helpers" / "bands_checks.py"


@pytest.mark.slow
def test_what_drivers_measure_with(stack_python: Path) -> None:
    """All checks in one process: its imports take longer than they do."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "smoke"), "OMP_NUM_THREADS": "1"}
    checks = [
        "weights_move_by_one_unit_in_the_last_place",
        "bits_are_those_of_the_matrix_products",
        "largest_difference_is_relative_to_each_tensor",
        "numbers_do_not_depend_on_the_shards",
        "projections_are_as_far_apart_as_gradients",
        "adapters_are_no_layers_of_the_model",
        "weights_that_begin_at_zero_are_filled",
    ]
    done = subprocess.run([stack_python, CHECKS, *checks], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
