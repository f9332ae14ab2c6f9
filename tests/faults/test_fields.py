"""The trials of single fields, which say which fields count as varied, still change what trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.catalog.data import data_root

# One of the configuration, of the optimizer, of its schedule and of data parallelism, and one without effect.
FIELDS = {
    "model.layernorm_epsilon": "reference",
    "optimizer.adam_beta2": "reference",
    "scheduler.end_weight_decay": "reference",
    "ddp.overlap_grad_reduce": "observed",
    "model.barrier_with_L1_time": "every digit the same",
}


@pytest.mark.fault
@pytest.mark.soak
def test_trials_find_what_their_record_has(stack_python: Path, tmp_path: Path) -> None:
    words = [word for name in FIELDS for word in ("--field", name)]
    command = [sys.executable, data_root() / "benchmarks/try_fields.py", "--python", stack_python, "--work", tmp_path]
    done = subprocess.run([*command, "--release", "any", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    for name, expected in FIELDS.items():
        assert any(f": {expected}" in result for result in outcomes[name].values()), outcomes[name]
