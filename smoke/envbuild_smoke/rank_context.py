"""What a rank knows of its case, and what it reports."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from envbuild_smoke.plan.axes import Part
from envbuild_smoke.plan.models import Case, Device, Model
from envbuild_smoke.results import (
    FailureKind,
    Gradient,
    Observed,
    Perturbed,
    ReferenceComparison,
    Step,
    Weights,
)

# Checkpoints that others read: the weights a baseline begins with, and those a case ends with.
INITIAL, FINAL = "initial", "final"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank reports, on the clock that all processes of a machine share: a step, or what comes once.

    With `weights_saved` the checkpoint of a baseline is complete: its cases can start. `compute_seconds` are reported
    by every rank, and all else by one.
    """

    monotonic_seconds: float
    step: Step | None = None
    weights_saved: bool = False
    observed: Observed | None = None
    reference: ReferenceComparison | None = None
    gradients: tuple[Gradient, ...] | None = None
    perturbed: tuple[Perturbed, ...] | None = None
    weights: Weights | None = None
    compute_seconds: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RaisedFailure:
    """What a rank that raises reports, at that moment on the same clock."""

    monotonic_seconds: float
    kind: FailureKind
    message: str


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a rank needs for a task. The ranks of a case meet at `host` and `port`; `listener` is rank 0's socket there.

    `case` has the layout of `part`, which is what the ranks train.
    `device_index` is the number of the GPU to train on among those this process sees. `world_size` is the task's, which
    may be a sweep.
    `save_final_weights` is set when the weights that this case ends with are compared. `send` sends to the runner.
    """

    case: Case
    part: Part
    model: Model
    device: Device
    out: Path
    rank: int
    host: str
    port: int
    world_size: int
    listener: int | None
    device_index: int = 0
    save_final_weights: bool = False
    send: Callable[[dict[str, object]], object]

    @property
    def checkpoint(self) -> Path:
        """Directory of the checkpoint that the baseline of this case saves and the others load."""
        return checkpoint_path(self.out, self.case.baseline or self.case.id, INITIAL)

    @property
    def final_checkpoint(self) -> Path:
        """Directory of the weights this case ends with, where they are to be compared."""
        return checkpoint_path(self.out, self.case.id, FINAL)

    @property
    def baseline_final_checkpoint(self) -> Path:
        """Directory of the weights that the baseline of this case ends with."""
        return checkpoint_path(self.out, self.case.baseline or self.case.id, FINAL)

    @property
    def resumes_from(self) -> Path | None:
        """Directory of the checkpoint that this part goes on from; None for the first."""
        return checkpoint_path(self.out, self.case.id, "resume") if self.part.after else None

    @property
    def saves_to(self) -> Path | None:
        """Directory of the checkpoint that another part goes on from; None for the last."""
        return None if self.is_last else checkpoint_path(self.out, self.case.id, "resume")

    @property
    def handover(self) -> Path:
        """The file with what the ranks of a part tell those of the next one."""
        return checkpoint_path(self.out, self.case.id, "handover.json")

    @property
    def is_last(self) -> bool:
        """Whether the case ends with this part."""
        return self.part.until == self.case.training.steps

    def report_step(self, step: Step) -> None:
        """Report a finished step; one rank of a case does this."""
        for name, value in (("loss", step.loss), ("grad_norm", step.grad_norm)):
            # Training on is pointless, and JSON has no NaN.
            if value is None or not math.isfinite(value):
                raise FloatingPointError(f"step {step.step}: {name} is {value}")
        self.report(step=replace(step, seconds=round(step.seconds, 4)))

    def report(self, **fields: Any) -> None:
        """Send a Report with these fields to the runner."""
        self.send({"event": "report", **asdict(Report(monotonic_seconds=time.monotonic(), **fields))})


def saves_final_weights(cases: Iterable[Case], case: Case) -> bool:
    """True if the weights that `case` ends with are compared, as a case's own or as its baseline's."""
    return case.compare_weights or any(other.compare_weights and other.baseline == case.id for other in cases)


def checkpoint_path(out: Path, case_id: str, name: str) -> Path:
    """Return the directory of a case's checkpoint."""
    return out / "checkpoints" / case_id / name


def nccl_log_of(folder: Path, rank: int) -> Path:
    """Return where NCCL's log of a rank goes, in the folder of its sweep."""
    return folder / f"nccl{rank}.log"
