"""The reference's formulas against torch's own, and against other forms of themselves, with the torch of a stack."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CHECKS = TESTS / "helpers" / "reference_checks.py"


def test_reference(stack_python: Path) -> None:
    """All checks in one process: its imports take longer than they do."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "smoke"), "OMP_NUM_THREADS": "1"}
    checks = [
        "formulas_are_torchs",
        "rotation_depends_on_the_distance",
        "state_space_is_its_recurrence",
        "packed_sequences_are_separate_ones",
        "packed_samples_are_split_by_document",
        "optimizer_is_torchs",
        "auxiliary_losses_are_of_a_micro_batch",
        "masks_weigh_tokens",
        "tensors_that_do_not_fit_are_not_compared",
        "nothing_of_megatron_is_loaded",
    ]
    done = subprocess.run([stack_python, CHECKS, *checks], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
