"""Trains cut-down recipes with Megatron-Bridge's own pretrain or finetune, in the runner's live ranks.

The model, data, optimizer and training loop are Megatron-Bridge's. Every case of a model starts from its baseline's
weights, resharded.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from envbuild_smoke.drivers.bridge.imports import import_bridge

    import_bridge()
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core.datasets.utils import compile_helpers

    from envbuild_smoke.drivers.bridge import cpu
    from envbuild_smoke.drivers.bridge.data import RecordedForwardStep
    from envbuild_smoke.drivers.bridge.hooks import CaseCallback
    from envbuild_smoke.drivers.bridge.recipe import recipe_of
    from envbuild_smoke.drivers.mcore.bandwidth import measure_bandwidth
    from envbuild_smoke.drivers.mcore.compare_weights import compare_weights
    from envbuild_smoke.drivers.recipe_training import Framework, PartRun, train_recipe

from envbuild_smoke.rank_context import RankContext

__all__ = ["check_start", "compare_weights", "measure_bandwidth", "train"]


def check_start() -> None:
    """Do what Megatron-Bridge begins every training with, and what needs no GPU.

    Raises RuntimeError where that ends the process: megatron-core's wheels have no Makefile (0.19.2), or there is no
    make.
    """
    try:
        compile_helpers()
    except (SystemExit, OSError) as error:
        raise RuntimeError(
            "Megatron-Bridge begins a training with megatron-core's compile_helpers(), which runs make in "
            "megatron/core/datasets; that failed, so no training begins"
        ) from error


def train(context: RankContext) -> None:
    """Train the part of a case with Megatron-Bridge, reporting each step from the last pipeline stage.

    When it returns, nothing of the case is left in the process. Raises ValueError for a case that this driver does not
    train, and FloatingPointError at a step whose loss or gradients are not finite.
    """
    if context.device == "cpu":
        cpu.install()
    train_recipe(context, Framework(_pretrain))


def _pretrain(context: RankContext, run: PartRun) -> None:
    read = RecordedForwardStep()
    train_with = pretrain if context.case.training.finetune == "none" else finetune
    train_with(recipe_of(context), read, callbacks=[CaseCallback(run, read)])
