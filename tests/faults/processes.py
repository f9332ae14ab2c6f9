"""Faults in the processes of a run: planted by the switch, while the fault's own model is trained."""

from __future__ import annotations

from typing import Any

from faults.cases import DATA, PIPELINE, TENSOR, WEIGHTS
from faults.kinds import Fault, Switch


def process_fault(**fields: Any) -> Fault:
    """A fault that the switch of the same name plants; in a process and the case of two data-parallel ranks."""
    defaults = {"where": "process", "case": DATA, "plant": Switch(name=fields["id"])}
    return Fault(**{**defaults, **fields})


PROCESS = (
    process_fault(
        id="other-samples-on-one-rank",
        broken="one data-parallel rank reads other samples",
        check="parity-loss",
        quick=True,
    ),
    process_fault(
        id="other-weights-on-one-rank",
        broken="one data-parallel rank starts from other weights",
        check="parity-grad-norm",
    ),
    process_fault(
        id="nan-at-step-3",
        broken="a gradient is no number at step 3",
        check="not-finite",
        quick=True,
    ),
    process_fault(
        id="killed-rank",
        broken="a rank is killed, as the kernel does when memory runs out",
        check="rank-signal",
        text="rank 1",
        quick=True,
    ),
    process_fault(
        id="out-of-memory",
        broken="a rank allocates more memory than it may have",
        check="rank-exception",
        text="rank 1",
    ),
    process_fault(
        id="rank-that-exits",
        broken="a library ends a rank without an exception",
        check="rank-exit",
        text="rank 1",
    ),
    process_fault(
        id="exit-0-without-results",
        broken="every rank ends with success and has trained nothing",
        check="rank-exit",
        text="exited with status 0",
        quick=True,
    ),
    process_fault(
        id="step-not-reported",
        broken="the numbers of a step are lost",
        case=PIPELINE,
        check="steps",
        quick=True,
    ),
    process_fault(
        id="killed-baseline",
        broken="the baseline is killed after it has saved its weights",
        check="baseline",
    ),
    process_fault(
        id="rounding",
        broken="gradients are rounded otherwise: too little for any band, but data parallelism must give all digits",
        check="data-parallel-bits",
    ),
    process_fault(
        id="damaged-checkpoint",
        broken="a disk gives back other bytes of the checkpoint than were written",
        where="file",
        case=TENSOR,
        check="rank-exception",
        text="has other values than the model in decoder.layers.0.mlp.linear_fc1.weight",
        at="baseline",
    ),
    process_fault(
        id="hung-rank",
        broken="a rank waits for ever",
        check="timeout",
        quick=True,
    ),
    process_fault(
        id="stopped-rank",
        broken="a rank is stopped (SIGSTOP) and never goes on",
        check="timeout",
    ),
    process_fault(
        id="last-update-lost",
        broken="the weights that a case ends with lack the last step's update; every loss was right",
        case=WEIGHTS,
        check="parity-weights",
        quick=True,
    ),
)
