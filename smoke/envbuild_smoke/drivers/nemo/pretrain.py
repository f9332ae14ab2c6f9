"""Trains cut-down recipes with NeMo's own pretrain, in the runner's live ranks.

The model, data, optimizer and training loop are NeMo's; process groups are made by NeMo from the ranks that the runner
started. Every case of a model starts from its baseline's weights, resharded.
"""

import gc
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

    from envbuild_smoke.drivers.nemo.imports import import_modelopt

    import_modelopt()
    from megatron.core import num_microbatches_calculator, parallel_state
    from nemo.utils import AppState
    from nemo.utils.metaclasses import Singleton

    from envbuild_smoke.drivers.mcore import checkpoints
    from envbuild_smoke.drivers.mcore.bandwidth import measure_bandwidth
    from envbuild_smoke.drivers.mcore.compare_weights import compare_weights
    from envbuild_smoke.drivers.mcore.data import SamplesRead
    from envbuild_smoke.drivers.mcore.observed_config import observe
    from envbuild_smoke.drivers.mcore.perturbation import largest_difference, mantissa_bits, move_weights
    from envbuild_smoke.drivers.mcore.processes import forget_parallelism, forget_transformer_engine, joined
    from envbuild_smoke.drivers.nemo import cpu
    from envbuild_smoke.drivers.nemo.hooks import CaseCallback, Chunks, unwrapped
    from envbuild_smoke.drivers.nemo.limits import Part, parts_of
    from envbuild_smoke.drivers.nemo.recipe import recipe_of

from envbuild_smoke.rank_context import RankContext

__all__ = ["compare_weights", "measure_bandwidth", "train"]


def train(context: RankContext) -> None:
    """Train the case of `context` with NeMo, reporting each step from the last pipeline stage.

    When it returns, nothing of the case is left in the process. Raises ValueError for a case that this driver does not
    train, and FloatingPointError at a step whose loss or gradients are not finite.
    """
    if context.device == "cpu":
        cpu.install()
    with joined(context):
        weights: dict[str, torch.Tensor] = {}
        _Pretrain(context).run(weights)
        runs = [_perturbed(context, seed, weights) for seed in range(context.case.perturbed_runs)]
        if runs:
            context.report_perturbed(runs)


def _perturbed(context: RankContext, seed: int, unmoved: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Train a baseline of one rank once more with its weights moved, and return what that measured."""
    # Scales of fp8 start anew.
    forget_transformer_engine()
    weights: dict[str, torch.Tensor] = {}
    steps, gradients = _Pretrain(context, moved_by=seed).run(weights)
    moved = largest_difference(unmoved, weights)
    shown = [{name: step[name] for name in ("step", "loss", "grad_norm")} for step in steps]
    return {"steps": shown, "gradients": gradients, "weights": moved if math.isfinite(moved) else None}


class _Pretrain:
    """One training by NeMo's pretrain, whose weights are moved by the seed `moved_by` where that is given."""

    def __init__(self, context: RankContext, moved_by: int | None = None) -> None:
        self._context, self._case, self._moved_by = context, context.case, moved_by
        self._samples = SamplesRead()

    def run(self, weights: dict[str, torch.Tensor]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Train; return the steps, and the gradients of the first one.

        A copy of the final weights goes into `weights` where the case is trained again.
        """
        _seed(self._case.training.seed)

        gradients: list[dict[str, Any]] = []
        steps: list[dict[str, Any]] = []
        for part in parts_of(self._case, self._context.resume_checkpoint):
            callback = CaseCallback(part, self._start, partial(self._end, part, weights), steps)
            # What is collected has the model in it: nothing here refers to it once pretrain has returned.
            pretrain: Callable[[], Any] = recipe_of(self._context, part, [callback])
            pretrain()
            steps, gradients = callback.steps, gradients or callback.gradients
            is_last = part.until == self._case.training.steps
            if is_last and self._moved_by is None and _is_reporting_rank():
                for step in steps:
                    self._context.report_step(**step)
                self._context.report_gradients(gradients)
            forget_nemo()
            forget_parallelism()
            del callback, pretrain
            gc.collect()
        return steps, gradients

    def _start(self, chunks: Chunks) -> bool:
        """Save the weights of a baseline, load those of any other case; return true if they were changed."""
        context = self._context
        if self._case.baseline is None and self._moved_by is None:
            checkpoints.save_weights(chunks, context.checkpoint)
            if torch.distributed.get_rank() == 0:
                context.report_weights_saved()
            return False
        checkpoints.load_weights(chunks, context.checkpoint)
        if self._moved_by is not None:
            for chunk in chunks:
                move_weights(chunk, mantissa_bits(self._case, context.model), self._moved_by)
        return True

    def _end(self, part: Part, weights: dict[str, torch.Tensor], wrapped: Chunks, optimizer: Any, data: Any) -> None:
        training = self._case.training
        per_step = training.microbatches(part.case.layout) * training.micro_batch_size
        data.add_samples(self._samples, part.until - part.after, per_step)
        if part.until < training.steps:
            return
        if self._case.perturbed_runs:
            named = (item for chunk in unwrapped(wrapped) for item in chunk.named_parameters())
            weights.update((name, value.detach().clone()) for name, value in named)
        if self._moved_by is not None:
            return
        observed = observe(part.case, wrapped, optimizer, self._samples)
        if _is_reporting_rank():
            self._context.report_observed(observed)
        if self._context.save_final_weights:
            checkpoints.save_weights(unwrapped(wrapped), self._context.final_checkpoint)


def forget_nemo() -> None:
    """Forget what NeMo keeps of a training in its modules: the next case is to find them as in a fresh process."""
    num_microbatches_calculator.unset_num_microbatches_calculator()
    # The sizes and ranks of the last layout.
    instances = getattr(Singleton, "_Singleton__instances")  # noqa: B009 - a private name
    instances.pop(AppState, None)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)


def _is_reporting_rank() -> bool:
    """True on one rank of the last pipeline stage: the first of its tensor, context and data groups."""
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )
