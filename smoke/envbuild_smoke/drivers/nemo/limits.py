"""Which GPUs driver nemo trains on, and what it needs of NeMo's log: all that needs no NeMo."""

from collections.abc import Mapping
from typing import SupportsFloat

from envbuild_smoke.drivers.parts import step_with
from envbuild_smoke.results import Step

# Logged by MegatronStrategy and by the recipe's TimingCallback.
LOSS, GRAD_NORM, SECONDS = "reduced_train_loss", "grad_norm", "train_step_timing in s"


def gpus_of(rank: int, world_size: int, own: int, visible: int) -> list[int]:
    """Return GPUs for the ranks of a case as Lightning wants them, this rank's `own` in its place.

    The runner chooses GPUs, and a rank knows its own alone: the others are any of the `visible` that are left.
    """
    others = [index for index in range(visible) if index != own][: world_size - 1]
    return [*others[:rank], own, *others[rank:]]


def step_of(logged: Mapping[str, SupportsFloat], step: int) -> Step:
    """Return the numbers of a step from what NeMo has logged of it.

    Raises KeyError where NeMo has not logged one, and FloatingPointError where the gradient norm is not finite.
    """
    missing = [name for name in (LOSS, GRAD_NORM, SECONDS) if name not in logged]
    if missing:
        raise KeyError(f"step {step}: NeMo logged no {', '.join(missing)}; it logged {', '.join(sorted(logged))}")
    return step_with(step, logged[LOSS], logged[GRAD_NORM], logged[SECONDS])
