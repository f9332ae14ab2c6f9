"""Trains a case of a recipe with a framework's own pretrain, in the runner's live ranks.

The model, data, optimizer and training loop are the framework's. Every case of a model starts from its baseline's
weights, resharded.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.transformer.module import Float16Module

from envbuild_smoke.drivers.handover import Handover, hand_over, handed_over
from envbuild_smoke.drivers.mcore import checkpoints
from envbuild_smoke.drivers.mcore.data import SamplesRead
from envbuild_smoke.drivers.mcore.observed_config import observe
from envbuild_smoke.drivers.mcore.perturbation import largest_difference, mantissa_bits, move_weights, perturbed
from envbuild_smoke.drivers.mcore.processes import (
    forget_parallelism,
    forget_transformer_engine,
    is_reporting_rank,
    joined,
)
from envbuild_smoke.rank_context import RankContext
from envbuild_smoke.results import Gradient, HuggingFace, Perturbed, Step

Chunks = list[torch.nn.Module]
# Megatron's default, init_method_std.
INITIAL_DEVIATION = 0.02


class Data(Protocol):
    """What has read the samples of a part."""

    def add_samples(self, read: SamplesRead, steps: int, per_step: int) -> None:
        """Add what this rank has read as steps of `per_step` samples; what was fetched ahead is left out."""


@dataclass(kw_only=True)
class PartRun:
    """A part while the framework trains it, and what it is called back with.

    `start` gets the chunks of the model once they are built, and changes their weights: what the optimizer has copied
    are others. `end` gets the chunks when they are trained, each inside of Megatron's
    DistributedDataParallel, the optimizer and the data. `gradients` are those of the first step of the case.
    `hugging_face` is what a framework compares before the first part, unless its weights are moved.
    """

    context: RankContext
    start: Callable[[Chunks], None]
    end: Callable[[Chunks, Any, Data, HuggingFace | None], None]
    is_moved: bool
    steps: list[Step] = field(default_factory=list)
    gradients: tuple[Gradient, ...] = ()
    hugging_face: HuggingFace | None = None

    @property
    def next_step(self) -> int:
        """The number of the step that comes next, or is under way."""
        return self.context.part.after + len(self.steps) + 1

    @property
    def wants_gradients(self) -> bool:
        """Whether those of the first step have yet to be summarized."""
        return not self.gradients and self.next_step == 1

    def finish(self, wrapped: Chunks, optimizer: Any, data: Data) -> None:
        """Call `end`; raise RuntimeError where the framework has trained more steps than the part has, or fewer."""
        part = self.context.part
        if self.next_step != part.until + 1:
            wanted = part.until - part.after
            raise RuntimeError(f"{len(self.steps)} steps were trained, where this part of the case has {wanted}")
        self.end(wrapped, optimizer, data, self.hugging_face)


@dataclass(frozen=True)
class Framework:
    """`pretrain` trains one part, and leaves nothing that refers to its model; `forget` clears what modules keep."""

    pretrain: Callable[[RankContext, PartRun], None]
    forget: Callable[[], None] = field(default=lambda: None)


def unwrapped(wrapped: Chunks) -> Chunks:
    """Return the chunks of the model without what Megatron wraps them in."""
    inner: Chunks = [chunk.module for chunk in wrapped]
    return [chunk.module if isinstance(chunk, Float16Module) else chunk for chunk in inner]


def train_recipe(context: RankContext, framework: Framework) -> None:
    """Train the part of a case, reporting each step from the last pipeline stage.

    When it returns, nothing of the case is left in the process. Raises ValueError for a case that recipes do not
    train, and FloatingPointError at a step whose loss or gradients are not finite.
    """
    weights: dict[str, torch.Tensor] = {}
    with joined(context):
        _Training(context, framework).run(weights)
        runs = [_perturbed(context, framework, seed, weights) for seed in range(context.case.perturbed_runs)]
        if runs:
            context.report(perturbed=runs)


def _perturbed(context: RankContext, framework: Framework, seed: int, unmoved: dict[str, torch.Tensor]) -> Perturbed:
    """Train a baseline of one rank once more with its weights moved, and return what that measured."""
    # Scales of fp8 start anew.
    forget_transformer_engine()
    weights: dict[str, torch.Tensor] = {}
    steps, gradients = _Training(context, framework, moved_by=seed).run(weights)
    return perturbed(steps, gradients, largest_difference(unmoved, weights))


class _Training:
    """One training, whose weights are moved by the seed `moved_by` where that is given."""

    def __init__(self, context: RankContext, framework: Framework, moved_by: int | None = None) -> None:
        self._context, self._case, self._moved_by = context, context.case, moved_by
        self._framework, self._reports = framework, False
        self._before = handed_over(context)
        self._samples = SamplesRead(self._before.samples)

    def run(self, weights: dict[str, torch.Tensor]) -> tuple[list[Step], tuple[Gradient, ...]]:
        """Train; return the steps, and the gradients of the first one.

        A copy of the final weights goes into `weights` where the case is trained again.
        """
        _seed(self._case.training.seed)
        run = PartRun(
            context=self._context,
            start=self._start,
            end=partial(self._end, weights),
            is_moved=self._moved_by is not None,
            hugging_face=self._before.hugging_face,
        )
        self._framework.pretrain(self._context, run)
        if self._moved_by is None and self._reports:
            for step in run.steps:
                self._context.report_step(step)
            if run.gradients:
                self._context.report(gradients=run.gradients)
        self._framework.forget()
        num_microbatches_calculator.unset_num_microbatches_calculator()
        forget_parallelism()
        gc.collect()
        return run.steps, run.gradients

    def _start(self, chunks: Chunks) -> None:
        """Save the weights of a baseline, load those of any other case."""
        context = self._context
        if self._case.baseline is None and self._moved_by is None:
            fill_zeros(chunks, self._case.training.seed)
            checkpoints.save_weights(chunks, context.checkpoint)
            if torch.distributed.get_rank() == 0:
                context.report(weights_saved=True)
            return
        checkpoints.load_weights(chunks, context.checkpoint)
        if self._moved_by is not None:
            for chunk in chunks:
                move_weights(chunk, mantissa_bits(self._case, context.model), self._moved_by)

    def _end(
        self,
        weights: dict[str, torch.Tensor],
        wrapped: Chunks,
        optimizer: Any,
        data: Data,
        hugging_face: HuggingFace | None,
    ) -> None:
        # A framework may have destroyed Megatron's groups when it returns.
        self._reports = is_reporting_rank()
        context, training, part = self._context, self._case.training, self._context.part
        per_step = training.microbatches(self._case.layout) * training.micro_batch_size
        data.add_samples(self._samples, part.until - part.after, per_step)
        if not context.is_last:
            samples = self._samples.digest(training)
            if self._reports:
                hand_over(context, Handover(samples=samples, hugging_face=hugging_face))
            return
        if self._case.perturbed_runs:
            named = (pair for chunk in unwrapped(wrapped) for pair in chunk.named_parameters())
            weights.update((name, value.detach().clone()) for name, value in named)
        if self._moved_by is not None:
            return
        observed = observe(self._case, wrapped, optimizer, self._samples)
        if self._reports:
            context.report(observed=replace(observed, hugging_face=hugging_face))
        if context.save_final_weights:
            checkpoints.save_weights(unwrapped(wrapped), context.final_checkpoint)


def fill_zeros(chunks: Chunks, seed: int) -> None:
    """Give the weights that begin at zero, biases and half of LoRA's, random values as Megatron gives the others.

    From zero, rounding decides where Adam takes them: moved by one unit in the last place, Qwen2.5's biases ended 16%
    away after 8 steps, LoRA's 24% (2x H100). And what is wrong with them would not show at first.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * INITIAL_DEVIATION)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    # As set_up_parallelism() does for driver mcore: frameworks make their groups themselves.
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)
