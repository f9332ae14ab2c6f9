"""Trains a GPT with Megatron-Core: its pipeline schedules, its data parallelism, its optimizer.

Every case of a model starts from the same weights (the baseline's checkpoint, resharded) and sees the same
samples in the same order, whatever its layout. Dropout is off and so is every fusion that needs a CUDA
extension. So a case differs from its baseline by rounding alone, unless something is wrong.
"""

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    # "Transformer Engine and Apex are not installed", five times over; the record lists what is installed.
    warnings.simplefilter("ignore")
    import torch
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

from envbuild_smoke.drivers.samples import context_part, global_batch, rank_micro_batches
from envbuild_smoke.plan import Case, Model
from envbuild_smoke.rank import RankContext

# megatron-core does not declare psutil, and without it the save of a checkpoint hangs: a helper process
# raises, and the one that waits for it never hears of it.
if not getattr(filesystem_async, "HAVE_PSUTIL", True):
    raise ImportError("psutil is missing: megatron-core needs it to save checkpoints, without declaring it")

# One micro batch: tokens and labels, each of shape [micro batch, sequence], int64.
MicroBatch = tuple[torch.Tensor, torch.Tensor]


def train(context: RankContext) -> None:
    """Train the case of `context`, reporting each step from the last pipeline stage."""
    case, model, training = context.case, context.model, context.case.training
    device = start_distributed(context)
    config = transformer_config(case, model)
    chunks = build_chunks(config, case, model, device)
    exchange_checkpoint(context, chunks)
    wrapped, optimizer = build_optimizer(config, case, chunks)
    microbatches = training.microbatches(case.layout)
    forward_backward = get_forward_backward_func()
    for step in range(1, training.steps + 1):
        began = time.monotonic()
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        samples = global_batch(
            training.seed, step, training.global_batch_size, model.sequence_length, model.vocabulary_size
        )
        # Each virtual stage walks the micro batches on its own.
        iterators = [own_batches(samples, case, device) for _ in wrapped]
        outputs = forward_backward(
            forward_step_func=partial(forward_step, model),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=microbatches,
            seq_length=model.sequence_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=False,
        )
        updated, grad_norm, _ = optimizer.step()
        if not updated:
            raise RuntimeError(f"step {step}: the optimizer skipped the update (a gradient is not finite)")
        loss = global_loss(outputs, microbatches)
        if is_reporting_rank():
            seconds = time.monotonic() - began
            context.report_step(step, loss=loss, grad_norm=float(grad_norm), seconds=seconds)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def start_distributed(context: RankContext) -> torch.device:
    """Join the ranks of the case, set up Megatron's process groups, and return the device to train on."""
    layout = context.case.layout
    on_cuda = context.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(context.rank)
        torch.use_deterministic_algorithms(True, warn_only=True)
    store = torch.distributed.TCPStore(
        "127.0.0.1",
        context.port,
        world_size=context.case.world_size,
        is_master=context.rank == 0,
        master_listen_fd=context.listener,
    )
    torch.distributed.init_process_group(
        "nccl" if on_cuda else "gloo", store=store, rank=context.rank, world_size=context.case.world_size
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(context.case.training.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(context.case.training.seed)
    return torch.device("cuda", context.rank) if on_cuda else torch.device("cpu")


def transformer_config(case: Case, model: Model) -> TransformerConfig:
    """Return Megatron's configuration of the model in the case's layout."""
    layout = case.layout
    bf16 = case.precision == "bf16"
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        sequence_parallel=layout.sequence,
        overlap_p2p_comm=case.settings.overlap_p2p_comm,
        batch_p2p_comm=case.settings.batch_p2p_comm,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        # Weights drawn on the CPU do not depend on the tensor-parallel size.
        use_cpu_initialization=True,
        deterministic_mode=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # These kernels come from Apex or nvFuser; the plain ones compute the same.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )


def build_chunks(config: TransformerConfig, case: Case, model: Model, device: torch.device) -> list[torch.nn.Module]:
    """Return this rank's part of the model: one module per virtual stage."""
    make_spec = get_gpt_layer_local_spec if model.layer_spec == "local" else get_gpt_layer_with_transformer_engine_spec
    chunks = []
    for stage in range(case.layout.virtual_pipeline):
        # None, not 0, is Megatron's "there are no virtual stages".
        stage_or_none = stage if case.layout.virtual_pipeline > 1 else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=make_spec(),
            vocab_size=model.vocabulary_size,
            max_sequence_length=model.sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage_or_none),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage_or_none),
            # Tied embeddings make first and last stage exchange gradients, one more thing to get right.
            share_embeddings_and_output_weights=True,
            vp_stage=stage_or_none,
        ).to(device)
        chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
    return chunks


def exchange_checkpoint(context: RankContext, chunks: list[torch.nn.Module]) -> None:
    """Save the weights if this is a baseline; otherwise load the baseline's, resharded."""
    state = {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(chunks)}
    if context.case.baseline is None:
        save_checkpoint(state, context.checkpoint)
        return
    # All chunks in one call: loaded one by one, each would lack the other's layers and be refused.
    loaded = dist_checkpointing.load(state, str(context.checkpoint))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"])


def save_checkpoint(state: dict[str, Any], directory: Path) -> None:
    """Save a torch_dist checkpoint; the directory appears when it is complete."""
    partial_directory = directory.with_name(f".{directory.name}.partial")
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(partial_directory, ignore_errors=True)
        partial_directory.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(partial_directory))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        os.replace(partial_directory, directory)


def build_optimizer(
    config: TransformerConfig, case: Case, chunks: list[torch.nn.Module]
) -> tuple[list[torch.nn.Module], Any]:
    """Wrap the chunks for data parallelism and return them with Megatron's Adam over all of them."""
    wrapped = [
        DistributedDataParallel(
            config=config,
            # Gradients are summed in float32 whatever the precision, as Megatron's own scripts do.
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
            ),
            module=chunk,
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
            clip_grad=case.training.clip_grad_norm,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=False,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def own_batches(samples: torch.Tensor, case: Case, device: torch.device) -> Iterator[MicroBatch]:
    """Yield this rank's micro batches of the global batch `samples`, shape [batch, sequence + 1]."""
    data_rank = parallel_state.get_data_parallel_rank()
    size = case.training.micro_batch_size
    for block in rank_micro_batches(samples.to(device), size, data_rank, case.layout.data):
        yield own_part(block[:, :-1]), own_part(block[:, 1:])


def own_part(tokens: torch.Tensor) -> torch.Tensor:
    """Return this context-parallel rank's part of `tokens`, shape [micro batch, sequence / context]."""
    rank = parallel_state.get_context_parallel_rank()
    return context_part(tokens, rank, parallel_state.get_context_parallel_world_size())


def forward_step(
    model: Model, batches: Iterator[MicroBatch], chunk: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """Run one micro batch through one chunk; the schedule calls this and then the returned loss function."""
    tokens, labels = next(batches)
    everything = torch.arange(model.sequence_length, device=tokens.device).expand(len(tokens), -1)
    # No mask is given: causal attention is part of the layer spec.
    output = chunk(tokens, own_part(everything), None, labels=labels)
    return output, mean_loss


def mean_loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean over the tokens of a micro batch, for the gradient and for the report.

    `token_losses` has shape [micro batch, sequence / context]. The schedule multiplies the first by the
    context-parallel size, and gradients are averaged over data and context ranks together: divided by that
    size here, a context rank counts with its share of the tokens and not with all of them.
    """
    mean = token_losses.float().mean()
    # A new tensor: the schedule scales what it gets in place, and the report must not change with it.
    return mean / parallel_state.get_context_parallel_world_size(), {"loss": mean.detach().clone()}


def global_loss(outputs: list[dict[str, torch.Tensor]], microbatches: int) -> float:
    """Return the mean loss over the global batch on the last pipeline stage, 0.0 on other stages."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return 0.0
    # float64: the result does not depend on how the samples were spread over ranks, to all digits shown.
    losses = [output["loss"].double() for output in outputs]
    total = torch.stack(losses).sum() / microbatches
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(total, group=group)
    return float(total) / int(torch.distributed.get_world_size(group))


def is_reporting_rank() -> bool:
    """True on one rank of the last pipeline stage: the first of its tensor, context and data groups."""
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )
