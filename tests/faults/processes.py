"""Faults in the processes of a run: planted by the switch, while the fault's own model is trained."""

from __future__ import annotations

from typing import Any

from faults.cases import DATA, PIPELINE, TENSOR, WEIGHTS
from faults.kinds import Fault, Switch


def process_fault(name: str, broken: str, check: str, **fields: Any) -> Fault:
    """A fault that the switch of the same name plants; in a process and the case of two data-parallel ranks."""
    defaults = {"where": "process", "case": DATA, "plant": Switch(name=name)}
    return Fault(id=name, broken=broken, check=check, **{**defaults, **fields})


PROCESS = (
    process_fault("other-samples-on-one-rank", "one data-parallel rank reads other samples", "parity-loss", quick=True),
    process_fault("other-weights-on-one-rank", "one data-parallel rank starts from other weights", "parity-grad-norm"),
    process_fault("nan-at-step-3", "a gradient is no number at step 3", "not-finite", quick=True),
    process_fault(
        "killed-rank",
        "a rank is killed, as the kernel does when memory runs out",
        "rank-signal",
        text="rank 1",
        quick=True,
    ),
    process_fault("out-of-memory", "a rank allocates more memory than it may have", "rank-exception", text="rank 1"),
    process_fault("rank-that-exits", "a library ends a rank without an exception", "rank-exit", text="rank 1"),
    process_fault(
        "exit-0-without-results",
        "every rank ends with success and has trained nothing",
        "rank-exit",
        text="exited with status 0",
        quick=True,
    ),
    process_fault("step-not-reported", "the numbers of a step are lost", "steps", case=PIPELINE, quick=True),
    process_fault("killed-baseline", "the baseline is killed after it has saved its weights", "baseline"),
    process_fault(
        "rounding",
        "gradients are rounded otherwise: too little for any band, but data parallelism must give all digits",
        "data-parallel-bits",
    ),
    process_fault(
        "damaged-checkpoint",
        "a disk gives back other bytes of the checkpoint than were written",
        "rank-exception",
        where="file",
        case=TENSOR,
        text="has other values than the model in decoder.layers.0.mlp.linear_fc1.weight",
        at="baseline",
    ),
    process_fault("hung-rank", "a rank waits for ever", "timeout", quick=True),
    process_fault("stopped-rank", "a rank is stopped (SIGSTOP) and never goes on", "timeout"),
    process_fault(
        "last-update-lost",
        "the weights that a case ends with lack the last step's update; every loss was right",
        "parity-weights",
        case=WEIGHTS,
        quick=True,
    ),
)
