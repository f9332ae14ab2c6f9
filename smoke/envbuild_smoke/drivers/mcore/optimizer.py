"""The optimizer of a case: Megatron's Adam, whole on every data-parallel rank or sharded over them."""

from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from envbuild_smoke.plan.models import Case

# Some gradients are zero but for rounding: adding a constant to all keys changes no attention. Adam divides
# a gradient by its own size, so with the usual 1e-8 such a bias walks off at random, on each layout elsewhere.
ADAM_EPSILON = 1e-5


def build_optimizer(
    config: TransformerConfig, case: Case, chunks: list[torch.nn.Module]
) -> tuple[list[torch.nn.Module], Any]:
    """Wrap the chunks for data parallelism and return them with Megatron's Adam over all of them."""
    sharded = case.settings.distributed_optimizer
    wrapped = [
        DistributedDataParallel(
            config=config,
            # Gradients are summed in float32 whatever the precision, as Megatron's own scripts do.
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=sharded
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
            lr=case.training.learning_rate,
            min_lr=case.training.learning_rate,
            weight_decay=0.0,
            adam_eps=ADAM_EPSILON,
            clip_grad=case.training.clip_grad_norm,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=sharded,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer
