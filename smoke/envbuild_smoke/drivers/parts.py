"""What driver nemo can train, on which GPUs, and what it needs of NeMo's log: all that needs no NeMo."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envbuild_smoke.plan.models import Case, Model

# Logged by MegatronStrategy and by the recipe's TimingCallback.
LOSS, GRAD_NORM, SECONDS = "reduced_train_loss", "grad_norm", "train_step_timing in s"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One call of NeMo's pretrain: the steps of `case` `after` one and `until` another, counted from 1.

    The layout may differ from that of the part before. A checkpoint is a directory.
    """

    case: Case
    after: int = 0
    until: int
    resumes_from: Path | None = None
    saves_to: Path | None = None


def parts_of(case: Case, checkpoint: Path) -> Iterator[Part]:
    """Return the parts of a case: two where it is resumed, with a `checkpoint` between them."""
    steps = case.training.steps
    if case.resume_at is None:
        yield Part(case=case, until=steps)
        return
    yield Part(case=case, until=case.resume_at, saves_to=checkpoint)
    there = replace(case, layout=case.continue_in or case.layout)
    yield Part(case=there, after=case.resume_at, until=steps, resumes_from=checkpoint)


def gpus_of(rank: int, world_size: int, own: int, visible: int) -> list[int]:
    """Return GPUs for the ranks of a case as Lightning wants them, this rank's `own` in its place.

    The runner chooses GPUs, and a rank knows its own alone: the others are any of the `visible` that are left.
    """
    others = [index for index in range(visible) if index != own][: world_size - 1]
    return [*others[:rank], own, *others[rank:]]


def refuse_unsupported(case: Case, model: Model) -> None:
    """Raise ValueError for a case of another kind than this driver trains."""
    training, settings = case.training, case.settings
    wrong = {
        "model.recipe": model.recipe is None,
        "moe and mamba": model.moe is not None or model.mamba is not None,
        "loss_mask, packed, calculate_per_token_loss, decoupled_lr": (
            training.loss_mask != "none"
            or training.packed
            or training.calculate_per_token_loss
            or training.decoupled_lr is not None
        ),
        "num_distributed_optimizer_instances": settings.num_distributed_optimizer_instances > 1,
    }
    named = [name for name, is_wrong in wrong.items() if is_wrong]
    if named:
        raise ValueError(f"driver nemo has no cases with this {'; '.join(named)}: leave it out of the matrix")


def step_of(logged: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Return the numbers of a step from what NeMo has logged of it.

    Raises KeyError where NeMo has not logged one, and FloatingPointError where the gradient norm is not finite.
    """
    missing = [name for name in (LOSS, GRAD_NORM, SECONDS) if name not in logged]
    if missing:
        raise KeyError(f"step {step}: NeMo logged no {', '.join(missing)}; it logged {', '.join(sorted(logged))}")
    grad_norm = float(logged[GRAD_NORM])
    if not math.isfinite(grad_norm):
        raise FloatingPointError(f"step {step}: grad_norm is {grad_norm}")
    return {"step": step, "loss": float(logged[LOSS]), "grad_norm": grad_norm, "seconds": float(logged[SECONDS])}
