"""Trains cut-down recipes with NeMo's own pretrain, in the runner's live ranks.

The model, data, optimizer and training loop are NeMo's; process groups are made by NeMo from the ranks that the runner
started. Every case of a model starts from its baseline's weights, resharded.
"""

import warnings
from collections.abc import Callable
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from envbuild_smoke.drivers.imports import cuda_not_asked

    with cuda_not_asked():
        from nemo.utils import AppState
        from nemo.utils.metaclasses import Singleton

        from envbuild_smoke.drivers.mcore.bandwidth import measure_bandwidth
        from envbuild_smoke.drivers.mcore.compare_weights import compare_weights
        from envbuild_smoke.drivers.nemo import cpu
        from envbuild_smoke.drivers.nemo.hooks import CaseCallback
        from envbuild_smoke.drivers.nemo.recipe import recipe_of
        from envbuild_smoke.drivers.recipe_training import Framework, PartRun, train_recipe

from envbuild_smoke.rank_context import RankContext

__all__ = ["compare_weights", "measure_bandwidth", "train"]


def train(context: RankContext) -> None:
    """Train the part of a case with NeMo, reporting each step from the last pipeline stage.

    When it returns, nothing of the case is left in the process. Raises ValueError for a case that this driver does not
    train, and FloatingPointError at a step whose loss or gradients are not finite.
    """
    if context.device == "cpu":
        cpu.install()
    train_recipe(context, Framework(_pretrain, forget_nemo))


def _pretrain(context: RankContext, run: PartRun) -> None:
    # What it is called back by has the model in it: nothing here refers to it once pretrain has returned.
    pretrain: Callable[[], Any] = recipe_of(context, [CaseCallback(run)])
    pretrain()


def forget_nemo() -> None:
    """Forget the sizes and ranks of the last layout, which NeMo keeps: the next case is to find a fresh process."""
    instances = getattr(Singleton, "_Singleton__instances")  # noqa: B009 - a private name
    instances.pop(AppState, None)
