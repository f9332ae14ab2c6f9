"""One rank of a case: what it knows, and how its end is put on record.

A rank that raises writes `rank<N>.failure.json` at that moment. Its peers fail a little later, when their
connections break, and may well be the first to exit; the record keeps cause and consequence apart.
"""

import json
import math
import os
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild_smoke import drivers
from envbuild_smoke.plan import Case, Device, Model

# What a rank runs, as "module:function"; tests put another function here.
DEFAULT_ENTRY = "envbuild_smoke.rank:train_case"

# Checkpoints that others read: the weights a baseline begins with, and those a case ends with.
INITIAL, FINAL = "initial", "final"

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def common_environment(device: Device) -> dict[str, str]:
    """Return the variables that have to be set before a rank's libraries are imported."""
    # One thread a process: the ranks share the machine's cores, and sums keep one order.
    environment = dict.fromkeys(_THREAD_VARIABLES, "1")
    # Megatron's overlap of communication needs kernels to start in the order in which they were queued.
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # gloo otherwise looks for its address by the host's name, which in a container may not resolve.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        # Megatron has torch compile a few small functions, which takes longer than to train a case, and a compiler.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    else:
        # cuBLAS gives the same digits in every run only with a fixed workspace.
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        # Transformer Engine's attention is to do so, too; Megatron's deterministic mode insists on it.
        environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        # Libraries ask torch.cuda.is_available() as they are imported. Answered through NVML, this does not
        # start CUDA, which a process that is to be forked must not have done.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return environment


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a rank is told. `listener` is rank 0's open socket on `port`, where the ranks of the case meet.

    `device_index` is the number of the GPU to train on among those this process sees. `world_size` is given for
    a task that is not the case's training: a comparison of weights by one rank, a sweep of bandwidth by many.
    `save_final_weights` says that somebody compares the weights this case ends with.
    """

    case: Case
    model: Model
    device: Device
    out: Path
    rank: int
    port: int
    listener: int | None
    device_index: int = 0
    world_size: int | None = None
    save_final_weights: bool = False

    @property
    def rank_count(self) -> int:
        """Number of ranks that take part."""
        return self.case.world_size if self.world_size is None else self.world_size

    @property
    def checkpoint(self) -> Path:
        """Directory of the checkpoint that the baseline of this case saves and the others load."""
        return self._checkpoint(self.case.baseline or self.case.id, INITIAL)

    @property
    def final_checkpoint(self) -> Path:
        """Directory of the weights this case ends with, where they are to be compared."""
        return self._checkpoint(self.case.id, FINAL)

    @property
    def baseline_final_checkpoint(self) -> Path:
        """Directory of the weights that the baseline of this case ends with."""
        return self._checkpoint(self.case.baseline or self.case.id, FINAL)

    @property
    def resume_checkpoint(self) -> Path:
        """Directory that a case which is torn down and resumed saves to in between."""
        return self._checkpoint(self.case.id, "resume")

    def _checkpoint(self, case_id: str, name: str) -> Path:
        return checkpoint_path(self.out, case_id, name)

    def report_step(self, step: int, *, loss: float, grad_norm: float, seconds: float) -> None:
        """Report a finished step (counted from 1); one rank of a case does this."""
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            # Training on is pointless, and JSON has no NaN.
            if not math.isfinite(value):
                raise FloatingPointError(f"step {step}: {name} is {value}")
        self._report(step=step, loss=loss, grad_norm=grad_norm, seconds=round(seconds, 4))

    def report_weights_saved(self) -> None:
        """Report that `checkpoint` is complete: the cases of this baseline can start. One rank does this."""
        self._report(weights_saved=True)

    def report_observed(self, observed: dict[str, Any]) -> None:
        """Report what was really built (schemas/result.schema.json says what that is); one rank does this."""
        self._report(observed=observed)

    def _report(self, **fields: Any) -> None:
        """Append a line to metrics.jsonl, told apart by its keys, in one write: several ranks may report."""
        line = {**fields, "monotonic_seconds": time.monotonic()}
        with metrics_path(self.out, self.case.id).open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def saves_final_weights(cases: Iterable[Case], case: Case) -> bool:
    """True if the weights that `case` ends with are compared, as a case's own or as its baseline's."""
    return case.compare_weights or any(other.compare_weights and other.baseline == case.id for other in cases)


def checkpoint_path(out: Path, case_id: str, name: str) -> Path:
    """Return the directory of a case's checkpoint."""
    return out / "checkpoints" / case_id / name


def metrics_path(out: Path, case_id: str) -> Path:
    """Return where the ranks of a case write what they report."""
    return out / "cases" / case_id / "metrics.jsonl"


def failure_record_path(out: Path, case_id: str, rank: int) -> Path:
    """Return where a rank that raises puts this on record."""
    return out / "cases" / case_id / f"rank{rank}.failure.json"


def in_a_line(error: BaseException) -> str:
    """Return what an exception says, "Type: message", in one line: the first, since hints come after the cause."""
    text = "".join(traceback.format_exception_only(type(error), error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, SyntaxError):
        # The place comes before.
        lines = [line for line in lines if line.startswith(type(error).__name__)] or lines[-1:]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__


def train_case(context: RankContext) -> None:
    """Train the case with its driver; the entry of every real rank."""
    print(
        f"rank {context.rank} of {context.case.world_size} of {context.case.id}, pid {os.getpid()}",
        flush=True,
    )
    if context.device == "cpu":
        from envbuild_smoke import cpu_shim

        cpu_shim.install()
    drivers.load(context.case.driver)(context)
