"""Faults that are planted on two GPUs, each by the switch, in one run; the two of a whole run are planted by hand.

python -m faults.gpus matrix > envs/matrices/gpu-faults.toml      # in a project with the lock
python -m faults.gpus variable      # ENVBUILD_FAULT for the run; the environment has the switch (environments.py)
envbuild certify ... --matrix gpu-faults --judge DIR --json | python -m faults.gpus judged
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from faults.cases import CONTINUED, DATA, TENSOR
from faults.kinds import Case, Fault, Switch
from faults.matrices import matrix_of

MATRIX = Path(__file__).with_name("gpus.toml")


def gpu_fault(name: str, broken: str, check: str, case: Case = DATA, text: str = "") -> Fault:
    """A fault that the switch of the same name plants."""
    return Fault(id=name, broken=broken, check=check, case=case, text=text, where="process", plant=Switch(name=name))


def of_the_hardware(name: str, broken: str, text: str) -> Fault:
    return gpu_fault(name, broken, "rank-exception", text=text)


GPU_FAULTS = (
    gpu_fault(
        "tensor-parallel-sums-left-out",
        "communication group: each tensor-parallel rank goes on with its own part of a sum",
        "parity-loss",
        case=TENSOR,
    ),
    gpu_fault(
        "gradients-a-thousandth-too-large",
        "gradient scale: in data parallel every gradient is 1.001 times what it is",
        "parity-grad-norm",
    ),
    gpu_fault(
        "resharded-state-has-zeros",
        "optimizer state: loaded in another layout it has zeros in a part",
        "parity-loss",
        case=CONTINUED,
    ),
    gpu_fault("products-in-tf32", "precision: products of float32 matrices are computed in TF32", "parity-gradients"),
    gpu_fault(
        "attention-falls-back",
        "attention backend: another than was asked for computes, without a word",
        "observed",
        case=Case(kind="engine", row={"data": 2, "precision": "bf16", "attention_backend": "fused"}),
        text="attention_backend",
    ),
    gpu_fault("samples-in-another-order", "data order: the micro batches of a step in another order", "samples"),
    gpu_fault("bit-flipped", "hardware: one bit of one gradient on one GPU, at step 3", "parity-grad-norm"),
    of_the_hardware("gpu-memory-exhausted", "hardware: a rank needs more memory than its GPU has", "out of memory"),
    of_the_hardware("gpu-lost", "hardware: from step 2 on every call to one GPU fails", "CUDA error"),
)


def judged(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each fault the checks that found it, from what ``certify --judge --json`` printed."""
    cases = {case["id"]: case for case in (document.get("error") or document)["cases"]}
    rows = []
    for fault in GPU_FAULTS:
        of_it = [case for name, case in cases.items() if name.startswith(f"{fault.model}-")]
        problems = [problem for case in of_it for problem in case["problems"]]
        named = [
            problem["text"] for problem in problems if problem["check"] == fault.check and fault.text in problem["text"]
        ]
        checks = sorted({problem["check"] for problem in problems})
        row = {"id": fault.id, "broken": fault.broken, "check": fault.check, "caught": bool(named), "found": checks}
        rows.append({**row, "says": named[0] if named else ""})
    return rows


if __name__ == "__main__":
    match sys.argv[1]:
        case "matrix":
            print(matrix_of(GPU_FAULTS, MATRIX), end="")
        case "variable":
            print(",".join(f"{fault.id}@{fault.model}" for fault in GPU_FAULTS))
        case "judged":
            print(json.dumps(judged(json.load(sys.stdin)), indent=2))
