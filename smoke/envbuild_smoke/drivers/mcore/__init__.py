"""Trains models with Megatron-Core: its pipeline schedules, its data parallelism, its optimizer.

Every case of a model starts from the same weights (the baseline's checkpoint, resharded) and sees the same
samples in the same order, whatever its layout. Dropout is off and so is every fusion that needs a CUDA
extension. So a case differs from its baseline by rounding alone, unless something is wrong.
"""

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

with warnings.catch_warnings():
    # "Transformer Engine and Apex are not installed", five times over; the record lists what is installed.
    warnings.simplefilter("ignore")
    import torch

    from envbuild_smoke.drivers.imports import cuda_not_asked

    with cuda_not_asked():
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from envbuild_smoke.drivers.mcore import checkpoints
        from envbuild_smoke.drivers.mcore.bandwidth import measure_bandwidth
        from envbuild_smoke.drivers.mcore.compare_weights import check_saved_weights, compare_weights
        from envbuild_smoke.drivers.mcore.config_fields import configuration
        from envbuild_smoke.drivers.mcore.data import SamplesRead, forward_step, global_loss, own_batches
        from envbuild_smoke.drivers.mcore.documents import DocumentSamples
        from envbuild_smoke.drivers.mcore.first_collective import FirstCollective
        from envbuild_smoke.drivers.mcore.gradients import summarize_gradients
        from envbuild_smoke.drivers.mcore.model import (
            GRAPHS_AFTER,
            build_chunks,
            check_initial_weights,
            transformer_config,
        )
        from envbuild_smoke.drivers.mcore.observed_config import observe
        from envbuild_smoke.drivers.mcore.optimizer import build_optimizer, schedule
        from envbuild_smoke.drivers.mcore.perturbation import (
            largest_difference,
            mantissa_bits,
            move_weights,
            perturbed,
        )
        from envbuild_smoke.drivers.mcore.processes import (
            forget_transformer_engine,
            is_reporting_rank,
            joined,
            set_up_parallelism,
        )
        from envbuild_smoke.drivers.mcore.reference_run import ReferenceRun

from envbuild_smoke.drivers.handover import Handover, hand_over, handed_over
from envbuild_smoke.drivers.parts import step_with
from envbuild_smoke.drivers.samples import global_batch
from envbuild_smoke.rank_context import RankContext
from envbuild_smoke.results import Gradient, Perturbed, Step

_Weights = Mapping[str, torch.Tensor]

__all__ = ["compare_weights", "measure_bandwidth", "train"]


def train(context: RankContext) -> None:
    """Train the part of a case, reporting each step from the last pipeline stage.

    When it returns, nothing of the case is left in the process. Raises FloatingPointError at the first step
    whose loss or gradients are not finite.
    """
    case, part = context.case, context.part
    with joined(context) as device:
        set_up_parallelism(case, device)
        run = _Run(context, device)
        run.start()
        for step in range(part.after + 1, part.until + 1):
            measured = run.step(step)
            if is_reporting_rank():
                context.report_step(measured)
        context.report(compute_seconds=run.compute_seconds)
        initial, weights = run.initial, run.weights() if case.perturbed_runs else {}
        run.finish()
        # The model refers to its process groups, which `joined` destroys next.
        del run
        if case.perturbed_runs:
            runs = [_perturbed(context, device, seed, (initial, weights)) for seed in range(case.perturbed_runs)]
            context.report(perturbed=runs)


def _perturbed(context: RankContext, device: torch.device, seed: int, unmoved: tuple[_Weights, _Weights]) -> Perturbed:
    """Train a baseline of one rank once more with its weights moved, and return what that measured.

    `unmoved` are the weights that it began with, and those that it ended with, as it was.
    """
    initial, final = unmoved
    # Scales of fp8 start anew.
    forget_transformer_engine()
    run = _Run(context, device, drawn=False)
    run.start_moved(initial, seed)
    steps = [run.step(step) for step in range(1, context.case.training.steps + 1)]
    measured = perturbed(steps, run.gradients, largest_difference(final, run.weights()))
    run.forget()
    return measured


class _Run:
    """A training under way: this rank's part of the model, its optimizer, and the samples it has read."""

    def __init__(self, context: RankContext, device: torch.device, *, drawn: bool = True) -> None:
        self._context = context
        self._case = context.case
        self._device = device
        self._samples = SamplesRead(handed_over(context).samples)
        folder = context.out / "cases" / self._case.id / "documents"
        of_documents = context.model.dataset == "text"
        self._documents = DocumentSamples(self._case, context.model, folder) if of_documents else None
        self._first_collective = FirstCollective(device)
        self._reference: ReferenceRun | None = None
        # Of a baseline that is trained again: its weights before the first step.
        self.initial: dict[str, torch.Tensor] = {}
        # Of the first step, by `summarize_gradients`.
        self.gradients: tuple[Gradient, ...] = ()
        self._build(drawn=drawn)

    def _build(self, *, drawn: bool = True) -> None:
        """Build the model; its weights are drawn, unless others take their places before anything reads them."""
        model = self._context.model
        self._config = transformer_config(self._case, model, self._device)
        # Drawn on the CPU, and by one thread: seconds where a model is large.
        self._config.perform_initialization = drawn
        self._chunks = build_chunks(self._config, self._case, model, self._device)
        # With Transformer Engine 2.11 on an H100 grouped experts are drawn 1% too small (0.0198 for 0.02), whyever.
        if drawn and not self._case.settings.moe_grouped_gemm:
            check_initial_weights(self._chunks, model)

    def _build_optimizer(self) -> None:
        self._wrapped, self._optimizer = build_optimizer(self._config, self._case, self._chunks)
        self._schedule = schedule(self._case, self._optimizer)
        self._gathers_on_use = self._case.settings.overlap_param_gather
        # As Megatron-LM's train(): the first step takes the weights as they were loaded. Gathered from the ranks'
        # shards they would hide a rank that loaded others.
        self._gather_on_use(False, gather_now=False)
        if self._case.settings.fp8_recipe == "delayed":
            self._set_scales()

    @property
    def compute_seconds(self) -> tuple[float, ...]:
        """Of each step, how long this rank computed before it first communicated."""
        return tuple(self._first_collective.seconds)

    def start(self) -> None:
        """Save the weights if this is a baseline; otherwise load the baseline's, or what the part before has saved."""
        if (directory := self._context.resumes_from) is not None:
            self._build_optimizer()
            same_layout = self._case.continue_in is None
            checkpoints.load_training(self._chunks, self._optimizer, self._schedule, directory, same_layout=same_layout)
            return
        # Before the optimizer is made: it copies the weights, where they are not in float32.
        if self._case.baseline is not None:
            checkpoints.load_weights(self._chunks, self._context.checkpoint)
        else:
            checkpoints.save_weights(self._chunks, self._context.checkpoint)
            check_saved_weights(self._chunks, self._context.checkpoint)
            self.initial = self.weights() if self._case.perturbed_runs else {}
            if torch.distributed.get_rank() == 0:
                self._context.report(weights_saved=True)
        if self._case.compare_reference:
            self._reference = ReferenceRun(self._case, self._context.model, self._chunks[0])
        self._build_optimizer()

    def start_moved(self, initial: Mapping[str, torch.Tensor], seed: int) -> None:
        """Take the weights that a baseline began with, and move each by one unit in the last place.

        Not those of its checkpoint: damage there would make the bands wide that have to find it.
        """
        for chunk in self._chunks:
            for name, parameter in chunk.named_parameters():
                parameter.data.copy_(initial[name])
            move_weights(chunk, mantissa_bits(self._case, self._context.model), seed)
        self._build_optimizer()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's weights."""
        named = ((name, value) for chunk in self._chunks for name, value in chunk.named_parameters())
        return {name: value.detach().clone() for name, value in named}

    def _gather_on_use(self, wanted: bool, *, gather_now: bool = True) -> None:
        """Where a case overlaps it, have weights gathered when a layer uses them, or stop that and gather them now."""
        if not self._case.settings.overlap_param_gather or wanted is self._gathers_on_use:
            return
        for chunk in self._wrapped:
            if wanted:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(param_sync=gather_now)
        self._gathers_on_use = wanted

    def step(self, step: int) -> Step:
        """Train one step and return what it measured."""
        began = time.monotonic()
        if self._case.settings.cuda_graph_impl != "none" and step == GRAPHS_AFTER + 1:
            self._capture_graphs()
        loss, grad_norm = self._forward_backward(step)
        self._gather_on_use(True)
        # Every rank knows the norm: none has to wait for the one that would report it.
        return step_with(step, loss, grad_norm, time.monotonic() - began)

    def _capture_graphs(self) -> None:
        """Capture this rank's layers as CUDA graphs, as Megatron-LM's train() does."""
        # Not every release has them.
        from megatron.core.num_microbatches_calculator import (
            destroy_num_microbatches_calculator,
            init_num_microbatches_calculator,
        )
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        training = self._case.training
        self._gather_on_use(False)
        helper = TECudaGraphHelper(
            model=self._wrapped,
            config=self._config,
            seq_length=self._context.model.sequence_length,
            micro_batch_size=training.micro_batch_size,
            optimizers=[self._optimizer],
        )
        # It asks this how often a step runs a layer.
        sizes = training.global_batch_size, training.micro_batch_size, self._case.layout.data
        init_num_microbatches_calculator(torch.distributed.get_rank(), None, *sizes)
        helper.create_cudagraphs()
        destroy_num_microbatches_calculator()
        if self._case.settings.overlap_param_gather:
            self._gather_on_use(True)
            helper.cuda_graph_set_manual_hooks()

    def _set_scales(self) -> None:
        """Compute the first step once, for nothing but delayed scales of fp8, which are those of earlier values.

        They begin as 1. With it weights have few digits left in the first step, and the gradients of each rank's first
        micro batch are zero, so that no two layouts agree.
        """
        samples, self._samples = self._samples, SamplesRead()
        if self._reference is not None:
            self._reference.watching = False
        self._compute(1)
        if self._reference is not None:
            self._reference.watching = True
        self._samples = samples

    def _compute(self, step: int) -> Any:
        """Compute losses and gradients of a step; return what the loss function reported of each micro batch."""
        model, training = self._context.model, self._case.training
        microbatches = training.microbatches(self._case.layout)
        # As Megatron-LM's train_step: gradients are summed in the buffers of DistributedDataParallel, and stay there.
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        # Every rank has the whole batch and takes its part: no samples have to be sent.
        shape = (training.global_batch_size, model.sequence_length, model.vocabulary_size)
        own = self._documents
        samples = global_batch(training.seed, step, *shape) if own is None else own.batch(step)
        self._samples.start_step()
        # Each virtual stage walks the micro batches on its own; what they are is noted once.
        iterators = [
            own_batches(samples, step, self._case, self._device, self._samples if index == 0 else None)
            for index in range(len(self._wrapped))
        ]
        self._first_collective.begin()
        return get_forward_backward_func()(
            forward_step_func=partial(forward_step, self._case),
            # The interleaved schedule asserts that it gets lists (megatron-core 0.16.1,
            # pipeline_parallel/schedules.py).
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._wrapped if len(self._wrapped) > 1 else self._wrapped[0],
            num_microbatches=microbatches,
            # Stages send each other tensors of this shape; packed documents are one sequence.
            seq_length=model.sequence_length * (training.micro_batch_size if training.packed else 1),
            micro_batch_size=1 if training.packed else training.micro_batch_size,
            forward_only=False,
        )

    def _forward_backward(self, step: int) -> tuple[float, float]:
        training = self._case.training
        outputs = self._compute(step)
        # The optimizer clips them in place.
        loss_scale = float(self._optimizer.get_loss_scale())
        if self._reference is not None:
            self._reference.gradients(loss_scale)
        if step == 1:
            self.gradients = summarize_gradients(self._wrapped, loss_scale)
        updated, grad_norm, _ = self._optimizer.step()
        self._first_collective.end()
        if not updated:
            raise FloatingPointError(f"step {step}: the optimizer skipped the update, a gradient is not finite")
        self._schedule.step(training.global_batch_size)
        microbatches = training.microbatches(self._case.layout)
        return global_loss(outputs, microbatches, per_token=training.calculate_per_token_loss), float(grad_norm)

    def finish(self) -> None:
        """Report what was built, and save the weights if they are compared; or save all for the next part."""
        self._gather_on_use(False)
        if self.gradients and is_reporting_rank():
            self._context.report(gradients=self.gradients)
        if (directory := self._context.saves_to) is not None:
            checkpoints.save_training(self._chunks, self._optimizer, self._schedule, directory)
            samples = self._samples.digest(self._case.training)
            if is_reporting_rank():
                hand_over(self._context, Handover(samples=samples))
        else:
            self._report_built()
        self.forget()

    def _report_built(self) -> None:
        observed = observe(self._case, self._wrapped, self._optimizer, self._samples)
        all_fields = self._case.baseline is None
        configured = configuration(self._wrapped, self._optimizer, self._schedule, all_fields=all_fields)
        observed = replace(observed, configuration=configured)
        if is_reporting_rank():
            self._context.report(observed=observed)
        if self._reference is not None:
            self._context.report(reference=self._reference.result(self._samples.steps))
        if self._context.save_final_weights:
            checkpoints.save_weights(self._chunks, self._context.final_checkpoint)

    def forget(self) -> None:
        """Let go of the model and the optimizer, down to the last tensor."""
        # Expert layers keep tensors of the last batch. Through those, autograd's graph, and the hooks on gradients,
        # the model refers to itself by ways that Python's garbage collector does not see.
        for module in [module for chunk in self._wrapped for module in chunk.modules()]:
            # NCCL waits for graphs that have its kernels before it lets go of a communicator.
            for graph in getattr(module, "cuda_graphs", None) or ():
                graph.reset()
            vars(module).clear()
        empty: list[Any] = []
        # The configuration refers to the optimizer, and the optimizer to the model.
        self._chunks, self._wrapped, self._optimizer, self._config = empty, empty, None, None
        self._schedule, self._reference, self._documents = None, None, None
