"""A baseline next to the reference: what it is, what it computed, and the reference's training from its weights."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from envbuild_smoke.drivers.mcore.float32_parts import Float32Parts
from envbuild_smoke.drivers.mcore.model import fp8_recipe
from envbuild_smoke.drivers.mcore.reference_config import model_config
from envbuild_smoke.drivers.mcore.weight_shapes import shape_problem
from envbuild_smoke.drivers.samples import (
    document_numbers,
    document_samples,
    global_batch,
    loss_masks,
    order_problem,
    rank_micro_batches,
    sample_digests,
)
from envbuild_smoke.plan.models import Case, Model
from envbuild_smoke.plan.precision import weights_dtype
from envbuild_smoke.reference.compare import compare
from envbuild_smoke.reference.config import NotComparedError, OptimizerConfig, ScheduleConfig
from envbuild_smoke.reference.fp8 import Fp8
from envbuild_smoke.reference.model import MicroBatch
from envbuild_smoke.reference.names import reference_name
from envbuild_smoke.reference.rounding import Rounding
from envbuild_smoke.reference.spread import Spread, measure
from envbuild_smoke.reference.training import Trained, train
from envbuild_smoke.results import ReferenceComparison

# The modules whose outputs are compared, where a model has them.
_OF_ATTENTION = r"self_attention\.(linear_qkv|[qk]_layernorm|core_attention)"
_PARTS = rf"\.(input_layernorm|{_OF_ATTENTION}|pre_mlp_layernorm|mlp\.router|norm)"
_ACTIVATIONS = re.compile(rf"embedding|decoder\.final_layernorm|decoder\.layers\.\d+({_PARTS})?")


class ReferenceRun:
    """Notes what a baseline of one rank computes, then trains the reference and compares.

    Made before the first step, with the model as it starts; `gradients` is called in the first step, before clipping.
    """

    def __init__(self, case: Case, model: Model, chunk: torch.nn.Module) -> None:
        self._case, self._model, self._chunk = case, model, chunk
        # False while something is computed that is no part of the training.
        self.watching = True
        self._initial = self._parameters()
        self._trained = Trained()
        self._float32 = (
            None
            if case.precision == "fp32"
            else Float32Parts(
                chunk, optimizer_config(case), lambda: self.watching, sums=case.settings.grad_reduce_in_fp32
            )
        )
        self._hooks = [
            module.register_forward_hook(self._noting(name))
            for name, module in ((reference_name(own), module) for own, module in chunk.named_modules())
            # What a fused layer holds itself is a module that does nothing.
            if _ACTIVATIONS.fullmatch(name) and type(module).__name__ != "IdentityOp"
        ]

    def gradients(self, loss_scale: float) -> None:
        """Keep the gradients of the first step, of a loss that has this scale; later ones only move the weights."""
        if self._float32 is not None:
            self._float32.gradients(loss_scale)
        if self._trained.gradients:
            return
        for hook in self._hooks:
            hook.remove()
        named = ((name, parameter.main_grad) for name, parameter in self._chunk.named_parameters())
        self._trained.gradients.update(
            (reference_name(name), gradient.detach().double() / loss_scale) for name, gradient in named
        )

    def result(self, read: Sequence[Sequence[bytes]]) -> ReferenceComparison:
        """Train the reference and return the comparison.

        `read` are the digests of the samples that the baseline has read, step by step.
        """
        began = time.monotonic()
        planned = [sample_digests(samples) for samples in self._samples()]
        # Other samples make other numbers, which would be taken for a wrong model.
        if (problem := order_problem(read, planned)) is not None:
            return ReferenceComparison(samples=problem)
        self._trained.weights.update(self._parameters())
        try:
            compared = compare(self._trained, *self._reference())
        except NotComparedError as error:
            compared = ReferenceComparison(reason=str(error))
        if self._float32 is not None:
            compared = replace(compared, float32_parts=self._float32.result())
        return replace(compared, seconds=round(time.monotonic() - began, 3))

    def _reference(self) -> "tuple[Trained, Spread | None]":
        """Train the reference; of fewer bits than fp32's also what their rounding may do to it."""
        if (problem := shape_problem(self._initial, self._model)) is not None:
            raise NotComparedError(problem)
        what = model_config(self._model), optimizer_config(self._case), self._initial, self._micro_batches()
        if self._case.precision == "fp32" or not self._case.perturbed_runs:
            return train(*what), None
        return measure(*what, runs=self._case.perturbed_runs, rounding=self._rounding())

    def _rounding(self) -> Rounding:
        if self._case.precision == "fp8":
            return Fp8(fp8_recipe(self._case, next(self._chunk.parameters()).device))
        return Rounding(getattr(torch, weights_dtype(self._case)))

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {reference_name(name): value.detach().clone() for name, value in self._chunk.named_parameters()}

    def _noting(self, name: str) -> Any:
        def note(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if self.watching and name not in self._trained.activations:
                # Megatron has the sequence first, but for packed samples, which are one sequence; the router has all
                # tokens in one dimension.
                training, length = self._case.training, self._model.sequence_length
                shape = (length, training.micro_batch_size)
                whole = value.detach().reshape(*(reversed(shape) if training.packed else shape), -1)
                self._trained.activations[name] = (whole if training.packed else whole.transpose(0, 1)).clone()

        return note

    def _samples(self) -> Iterator[torch.Tensor]:
        training, model = self._case.training, self._model
        size, shape = training.global_batch_size, (model.sequence_length, model.vocabulary_size)
        if model.dataset == "text":
            yield from document_samples(training.seed, training.steps * size, *shape).split(size)
            return
        for step in range(1, training.steps + 1):
            yield global_batch(training.seed, step, size, *shape)

    def _micro_batches(self) -> Iterator[list[MicroBatch]]:
        device, training = next(self._chunk.parameters()).device, self._case.training
        for step, samples in enumerate(self._samples(), 1):
            shape = (training.global_batch_size, self._model.sequence_length)
            masks = loss_masks(training.seed, step, *shape, training.loss_mask)
            documents = document_numbers(training.seed, step, *shape, training.packed)
            shares = (
                rank_micro_batches(whole.to(device), training.micro_batch_size, 0, 1)
                for whole in (samples, masks, documents)
            )
            yield [
                MicroBatch(
                    tokens=block[:, :-1],
                    labels=block[:, 1:],
                    loss_mask=mask,
                    segments=numbers if training.packed else None,
                )
                for block, mask, numbers in zip(*shares, strict=True)
            ]


def optimizer_config(case: Case) -> OptimizerConfig:
    """Return how the plan's case trains, for the reference."""
    training = case.training
    return OptimizerConfig(
        learning_rate=training.learning_rate,
        embedding_learning_rate=training.decoupled_lr,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        epsilon=training.adam_eps,
        weight_decay=training.weight_decay,
        clip_norm=training.clip_grad_norm,
        per_token_loss=training.calculate_per_token_loss,
        schedule=ScheduleConfig(
            steps=training.steps,
            style=training.lr_decay_style,
            warmup=training.lr_warmup_iters,
            first=training.lr_warmup_init,
            decay=training.decay_steps,
            least=training.min_lr,
            wsd_decay=training.lr_wsd_decay_iters or 1,
            wsd_style=training.lr_wsd_decay_style,
            first_weight_decay=training.start_weight_decay,
            weight_decay_style=training.weight_decay_incr_style,
        ),
    )
