"""The optimizer of a case: Megatron's Adam, whole on every data-parallel rank or sharded over them.

Gradients are exchanged, and sharded weights gathered, at the end of a step or bucket by bucket meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from envbuild_smoke.plan.models import Case
from envbuild_smoke.plan.precision import INITIAL_LOSS_SCALE, LOSS_SCALE_WINDOW


def build_optimizer(
    config: TransformerConfig, case: Case, chunks: list[torch.nn.Module]
) -> tuple[list[torch.nn.Module], Any]:
    """Wrap the chunks for data parallelism and return them with Megatron's Adam over all of them."""
    settings, training = case.settings, case.training
    sharded = settings.distributed_optimizer
    with _own_stream(chunks):
        wrapped = [
            DistributedDataParallel(
                config=config,
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
                    average_in_collective=settings.average_in_collective,
                    overlap_grad_reduce=settings.overlap_grad_reduce,
                    overlap_param_gather=settings.overlap_param_gather,
                    bucket_size=settings.bucket_size,
                    use_distributed_optimizer=sharded,
                    num_distributed_optimizer_instances=settings.num_distributed_optimizer_instances,
                ),
                module=chunk,
                # As Megatron-LM's get_model: the communication of later chunks overlaps with computing anyway.
                disable_bucketing=index > 0,
            )
            for index, chunk in enumerate(chunks)
        ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=training.learning_rate,
            min_lr=training.min_lr,
            # Of parameters that Megatron marks: the embedding and the output layer.
            decoupled_lr=training.decoupled_lr,
            decoupled_min_lr=None if training.decoupled_lr is None else training.min_lr,
            weight_decay=training.weight_decay,
            adam_beta1=training.adam_beta1,
            adam_beta2=training.adam_beta2,
            adam_eps=training.adam_eps,
            clip_grad=training.clip_grad_norm,
            bf16=config.bf16,
            fp16=config.fp16,
            loss_scale=settings.loss_scale,
            initial_loss_scale=INITIAL_LOSS_SCALE,
            loss_scale_window=LOSS_SCALE_WINDOW,
            use_precision_aware_optimizer=settings.use_precision_aware_optimizer,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=sharded,
            overlap_param_gather=settings.overlap_param_gather,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if settings.overlap_grad_reduce:
        # As Megatron-LM's train() with its default, align_grad_reduce: pipeline stages reduce at the same time.
        config.no_sync_func = _each_or_only([chunk.no_sync for chunk in wrapped])
        config.grad_sync_func = _each_or_only([chunk.start_grad_sync for chunk in wrapped])
    return wrapped, optimizer


@contextmanager
def _own_stream(chunks: list[torch.nn.Module]) -> Iterator[None]:
    """On a GPU, run what is inside in a stream of its own, after all before it and before all after it.

    As Megatron-LM's get_model (training.py): the hooks on gradients then run in that stream, and not where the model
    is computed, which a reduction has to wait for too.
    """
    if next(chunks[0].parameters()).device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _each_or_only(functions: list[Callable[..., Any]]) -> "list[Callable[..., Any]] | Callable[..., Any]":
    """Return them as the schedules of pipelines expect it: a list only where there are virtual stages."""
    return functions if len(functions) > 1 else functions[0]


def schedule(case: Case, optimizer: Any) -> OptimizerParamScheduler:
    """Return Megatron's scheduler: it gives each group of parameters its own learning rate and weight decay.

    Without it every group would have those of the optimizer. Biases and norms have no weight decay. It counts samples,
    as Megatron-LM's does (training.py, get_optimizer_param_scheduler).
    """
    training = case.training
    batch, first = training.global_batch_size, training.start_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=training.lr_warmup_init,
        max_lr=training.learning_rate,
        min_lr=training.min_lr,
        lr_warmup_steps=training.lr_warmup_iters * batch,
        lr_decay_steps=training.decay_steps * batch,
        lr_decay_style=training.lr_decay_style,
        start_wd=training.weight_decay if first is None else first,
        end_wd=training.weight_decay,
        wd_incr_steps=training.steps * batch,
        wd_incr_style=training.weight_decay_incr_style,
        wsd_decay_steps=None if training.lr_wsd_decay_iters is None else training.lr_wsd_decay_iters * batch,
        lr_wsd_decay_style=training.lr_wsd_decay_style,
    )
