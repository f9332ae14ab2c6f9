"""Trains cut-down recipes with Megatron-Bridge's own pretrain or finetune, in the runner's live ranks.

The model, data, optimizer and training loop are Megatron-Bridge's. Every case of a model starts from its baseline's
weights, resharded.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from envbuild_smoke.drivers.bridge.imports import import_bridge

    import_bridge()
    from megatron.bridge.training import initialize
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core.datasets import helpers_cpp

    from envbuild_smoke.drivers.bridge import cpu
    from envbuild_smoke.drivers.bridge.data import RecordedForwardStep
    from envbuild_smoke.drivers.bridge.hooks import CaseCallback
    from envbuild_smoke.drivers.bridge.recipe import recipe_of
    from envbuild_smoke.drivers.mcore.bandwidth import measure_bandwidth
    from envbuild_smoke.drivers.mcore.compare_weights import compare_weights
    from envbuild_smoke.drivers.mcore.processes import joined
    from envbuild_smoke.drivers.recipe_training import Framework, PartRun, train_recipe

from envbuild_smoke.rank_context import RankContext

__all__ = ["compare_weights", "measure_bandwidth", "train"]


def train(context: RankContext) -> None:
    """Train the case of `context` with Megatron-Bridge, reporting each step from the last pipeline stage.

    When it returns, nothing of the case is left in the process. Raises ValueError for a case that this driver does not
    train, and FloatingPointError at a step whose loss or gradients are not finite.
    """
    if context.device == "cpu":
        cpu.install()
    initialize.compile_helpers = _keep_helpers
    with joined(context):
        train_recipe(context, Framework(_pretrain, _forget_bridge))


def _pretrain(context: RankContext, run: PartRun) -> None:
    read = RecordedForwardStep()
    train_with = pretrain if context.case.training.finetune == "none" else finetune
    train_with(recipe_of(context, run.part), read, callbacks=[CaseCallback(run, read)])


def _keep_helpers() -> None:
    """Leave the compiled helper of datasets as megatron-core's wheel has it.

    At its start Megatron-Bridge compiles it anew with a Makefile that the wheels of megatron-core do not have, and ends
    the process (0.6.2 with megatron-core 0.19.2). Importing it shows that it is there.
    """
    assert helpers_cpp.build_sample_idx_int32  # noqa: S101 - for the reader


def _forget_bridge() -> None:
    """Nothing is left: Megatron-Bridge keeps the state of a training in an object of its own."""
