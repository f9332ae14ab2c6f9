"""The rules of layouts and settings: what megatron-core refuses. What it trains wrongly is in ``envs/conflicts/``.

They exist here alone: the smoke runner trains the plan that was made by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from envbuild.catalog.fields import Device
from envbuild.certify.cases.architecture_rules import architecture_needs, router_needs
from envbuild.certify.cases.case import ResolvedRow
from envbuild.certify.cases.stage_rules import stage_sizes
from envbuild.certify.cases.training_rules import fusion_needs, schedule_needs

# Qwen2.5-7B cut to hidden size 128 has 28 heads of 4, for which no attention backend exists; 224 and 3584 work.
HEAD_SIZE_MULTIPLE = 8
# The tensor cores take fp8 matrices in multiples of 16 along every side. Heads of a multiple of 8 with as many queries
# as hidden_size have keys and values in that multiple too.
FP8_MULTIPLE = 16
# Ada (SM 89) is the first generation whose tensor cores take fp8.
FP8_LEAST_SM = 89
# Transformer Engine has fp8 with a scale for each block from Hopper on.
BLOCKWISE_LEAST_SM = 90
# A packed sample has documents of a multiple of a sixteenth of it, as smoke's drivers/samples.py cuts them.
DOCUMENT_PARTS = 16
# With one or no entry on a tensor-parallel rank there is nothing to compare.
LEAST_VOCABULARY_PER_RANK = 2
# A Mamba layer is twice as wide inside, as megatron-core makes it.
MAMBA_EXPANSION = 2
# Larger parallel sizes are not listed as allowed values.
LARGEST_LISTED = 64


def broken_rules(row: ResolvedRow) -> list[str]:
    """The rules of layouts and settings that a row breaks, each with the values that it allows."""
    sizes = (_sizes, _batches, _expert_sizes, _mamba_sizes, _fp8_sizes)
    needs = (
        _layout_needs,
        _overlap_needs,
        _training_needs,
        _finetune_needs,
        _setting_needs,
        _graph_needs,
        _local_needs,
    )
    broken = [
        rule for source in (*sizes, *needs, schedule_needs, fusion_needs, architecture_needs) for rule in source(row)
    ]
    return broken + _continued(row)


def _continued(row: ResolvedRow) -> list[str]:
    """The rules that a case breaks with the layout and the nodes with which it continues."""
    case = row.case
    named = [name for name in ("continue_in", "continue_nodes") if getattr(case, name) is not None]
    if case.resume_at is None or not named:
        return [f"{name} needs resume_at" for name in named]
    after = case.parts[-1]
    layout = after.layout
    # Without these its own rules end there: broken_rules() comes back to this function.
    changes: dict[str, object] = {**vars(layout), "nodes": after.nodes, **dict.fromkeys(named)}
    if layout.data * layout.context == 1:
        # One rank has the whole state of an optimizer that was sharded, and its only bucket.
        changes |= dict.fromkeys(("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), False)
        changes |= {"bucket_size": None, "num_distributed_optimizer_instances": 1, "average_in_collective": False}
    return [f"after resume_at: {rule}" for rule in broken_rules(replace(row, values={**row.values, **changes}))]


def missing_capabilities(row: ResolvedRow) -> list[str]:
    """The device, packages and GPU generations that a row needs and that it would not find."""
    return list(_capability_needs(row))


def _sizes(row: ResolvedRow) -> Iterator[str]:
    layout, model = row.case.layout, row.model
    heads, groups, hidden = model.num_attention_heads, model.query_groups, model.hidden_size
    if model.architecture.kv_channels is None:
        yield from _multiple("hidden_size", hidden, "num_attention_heads", heads)
    yield from _multiple("num_attention_heads", heads, "num_query_groups", groups)
    yield from _multiple("processes", layout.world_size, "nodes =", row.case.nodes)
    yield from stage_sizes(row)
    split = [("num_attention_heads", heads), ("vocabulary_size", model.vocabulary_size)]
    if model.num_query_groups is not None:
        split.append(("num_query_groups", groups))
    for name, value in split:
        yield from _multiple(name, value, "tensor =", layout.tensor)
    sequence = model.sequence_length
    # megatron-core cuts the sequence into two pieces a rank, one from each end, so that causal attention is shared
    # evenly (get_batch_on_this_cp_rank).
    if layout.context > 1:
        yield from _multiple("sequence_length", sequence, "2 x context =", 2 * layout.context)
    if layout.sequence and sequence % layout.context == 0:
        yield from _multiple("sequence_length / context", sequence // layout.context, "tensor =", layout.tensor)
    if (hidden % heads == 0 or model.architecture.kv_channels) and model.head_size % HEAD_SIZE_MULTIPLE:
        name = "kv_channels" if model.architecture.kv_channels else "hidden_size / num_attention_heads"
        yield (
            f"{name} is {model.head_size} and must be a multiple of {HEAD_SIZE_MULTIPLE} "
            "(no attention backend takes others)"
        )
    if row.case.training.packed:
        # Of each document a context-parallel rank has two pieces, as of a whole sequence.
        parts = DOCUMENT_PARTS * (2 * layout.context if layout.context > 1 else 1)
        yield from _multiple("sequence_length", sequence, "the parts of packed documents =", parts)
    least = LEAST_VOCABULARY_PER_RANK * layout.tensor
    if model.vocabulary_size < least:
        yield (
            f"vocabulary_size {model.vocabulary_size} must be at least {LEAST_VOCABULARY_PER_RANK} x tensor = {least}"
        )


def _batches(row: ResolvedRow) -> Iterator[str]:
    layout = row.case.layout
    batch, samples = row.case.training.rows, row.case.training.micro_batch_size * layout.data
    name = "half of global_batch_size =" if row.case.training.packs_pairs else "global_batch_size"
    yield from _multiple(name, batch, "micro_batch_size x data =", samples)
    # The interleaved schedule works through micro batches in groups of the pipeline's size.
    if layout.virtual_pipeline > 1 and batch % samples == 0:
        yield from _multiple("the number of micro batches", batch // samples, "pipeline =", layout.pipeline)


def _expert_sizes(row: ResolvedRow) -> Iterator[str]:
    layout, settings, experts = row.case.layout, row.case.settings, row.model.moe
    if experts is None:
        if layout.expert > 1:
            yield f"expert = {layout.expert} needs a model with experts (moe)"
        for name in ("expert_tensor", "moe_token_dispatcher_type", "moe_grouped_gemm"):
            if vars(layout).get(name) or vars(settings).get(name):
                yield f"{name} needs a model with experts (moe)"
        return
    yield from router_needs(row, experts)
    # Experts are spread over the ranks that otherwise hold the same weights, and over those of tensor where they are
    # not split as the other layers are.
    if layout.expert_tensor is None:
        yield from _multiple("data x context =", layout.data * layout.context, "expert =", layout.expert)
    yield from _multiple("num_experts", experts.num_experts, "expert =", layout.expert)
    if layout.expert_tensor is not None:
        ranks = layout.data * layout.context * layout.tensor
        yield from _multiple(
            "data x context x tensor =", ranks, "expert x expert_tensor =", layout.expert * layout.expert_tensor
        )
    if experts.router_topk > experts.num_experts:
        yield f"router_topk {experts.router_topk} must be at most num_experts {experts.num_experts}"
    if layout.tensor > 1 and not layout.sequence:
        yield "tensor > 1 with experts needs sequence (megatron-core refuses to train them without)"


def _mamba_sizes(row: ResolvedRow) -> Iterator[str]:
    layout, settings, model, mamba = row.case.layout, row.case.settings, row.model, row.model.mamba
    if mamba is None:
        return
    layers = len(mamba.hybrid_override_pattern)
    if layers != model.num_layers:
        yield (
            f"hybrid_override_pattern has {layers} letters and must have one for each of num_layers {model.num_layers}"
        )
    inner, groups = MAMBA_EXPANSION * model.hidden_size, mamba.num_groups
    yield from _multiple(f"{MAMBA_EXPANSION} x hidden_size =", inner, "mamba.head_dim", mamba.head_dim)
    heads = inner // mamba.head_dim
    name = f"{MAMBA_EXPANSION} x hidden_size / mamba.head_dim ="
    yield from _multiple(name, heads, "tensor x context =", layout.tensor * layout.context)
    yield from _multiple(name, heads, "mamba.num_groups", groups)
    yield from _multiple("mamba.num_groups", groups, "tensor =", layout.tensor)
    # The condition of megatron-core's MambaContextParallel, which repeats groups or splits them over the ranks.
    own = groups // layout.tensor
    if groups % layout.tensor == 0 and own % layout.context and layout.context % own:
        yield f"mamba.num_groups / tensor is {own} and must be a multiple or a divisor of context = {layout.context}"
    if layout.virtual_pipeline > 1:
        yield "virtual_pipeline > 1 needs a model of kind gpt"
    if settings.recompute == "full":
        yield "recompute = full needs a model of kind gpt (megatron-core's Mamba layers ignore it)"


def _fp8_sizes(row: ResolvedRow) -> Iterator[str]:
    layout, model = row.case.layout, row.model
    if row.case.precision != "fp8":
        return
    hidden, mamba = model.hidden_size, model.mamba
    sizes = []
    if hidden % layout.tensor == 0:
        sizes.append(("hidden_size / tensor =", hidden // layout.tensor))
    parts = layout.context * (layout.tensor if layout.sequence else 1)
    if model.sequence_length % parts == 0:
        sizes.append(
            ("tokens of a micro batch on a rank =", model.sequence_length // parts * row.case.training.micro_batch_size)
        )
    if mamba is not None and hidden * MAMBA_EXPANSION % mamba.head_dim == 0:
        inner = MAMBA_EXPANSION * hidden
        # One projection makes z, x, B, C and dt together (in_proj of megatron-core's MambaMixer).
        width = 2 * inner + 2 * mamba.num_groups * mamba.state_dim + inner // mamba.head_dim
        if width % layout.tensor == 0:
            sizes.append(("the width of a Mamba layer's input projection / tensor =", width // layout.tensor))
    for name, size in sizes:
        if size % FP8_MULTIPLE:
            yield f"{name} {size} must be a multiple of {FP8_MULTIPLE} for fp8"


def _layout_needs(row: ResolvedRow) -> Iterator[str]:
    layout, settings, model = row.case.layout, row.case.settings, row.model
    local = model.layer_spec == "local"
    interleaved, overlap = layout.virtual_pipeline > 1, settings.overlap_p2p_comm
    if interleaved and layout.pipeline == 1:
        yield "virtual_pipeline needs pipeline > 1"
    # megatron-core's schedule without interleaving raises a ValueError for it (pipeline_parallel/schedules.py).
    if overlap and layout.pipeline > 1 and not interleaved:
        yield "overlap_p2p_comm with pipeline > 1 needs virtual_pipeline > 1"
    if layout.sequence and layout.tensor == 1:
        yield "sequence needs tensor > 1"
    # megatron-core 0.16.1 fails with "sequence parallel not supported by torch LayerNorm".
    if layout.sequence and local and model.normalization != "RMSNorm":
        yield (
            'sequence with layer_spec local needs normalization "RMSNorm" (torch\'s LayerNorm has no sequence parallel)'
        )
    # On the CPU smoke's driver has a small, slow attention of its own that supports this layout.
    if layout.context > 1 and local and row.capabilities.device is Device.CUDA:
        yield "context > 1 needs layer_spec transformer-engine (megatron-core's own attention has no context parallel)"
    if settings.distributed_optimizer and layout.data * layout.context == 1:
        yield "distributed_optimizer needs data x context > 1 (there is nothing to shard it over)"


def _overlap_needs(row: ResolvedRow) -> Iterator[str]:
    """What Megatron-LM's command line asserts (arguments.py), and its library ignores or does not support."""
    layout, settings = row.case.layout, row.case.settings
    if settings.average_in_collective and layout.data * layout.context == 1:
        yield "average_in_collective needs data x context > 1 (there is nothing to average)"
    if settings.overlap_grad_reduce and layout.data * layout.context == 1:
        yield "overlap_grad_reduce needs data x context > 1 (there is nothing to reduce)"
    if settings.overlap_param_gather and not (settings.distributed_optimizer and settings.overlap_grad_reduce):
        yield "overlap_param_gather needs distributed_optimizer and overlap_grad_reduce"
    instances = settings.num_distributed_optimizer_instances
    if instances > 1 and not settings.distributed_optimizer:
        yield "num_distributed_optimizer_instances > 1 needs distributed_optimizer"
    yield from _multiple(
        "data x context =", layout.data * layout.context, "num_distributed_optimizer_instances =", instances
    )
    if settings.bucket_size is not None and not settings.overlap_grad_reduce:
        yield "bucket_size needs overlap_grad_reduce (megatron-core makes one bucket without it)"


def _training_needs(row: ResolvedRow) -> Iterator[str]:
    """Trainings that are other ones with another micro batch size."""
    training = row.case.training
    moe = row.model.moe
    other_micro_batch = training.micro_batch_size != row.matrix_training.micro_batch_size
    if moe is not None and moe.router_load_balancing_type == "aux_loss" and other_micro_batch:
        yield "router_load_balancing_type = aux_loss needs the matrix's micro_batch_size (it balances each micro batch)"
    if training.packed and row.model.mamba is not None:
        yield "packed needs a model of kind gpt (not every megatron-core resets a Mamba layer's state)"
    if training.packed and moe is not None and moe.router_load_balancing_type == "seq_aux_loss":
        yield "packed needs another router_load_balancing_type than seq_aux_loss (a micro batch is one sequence)"
    if training.loss_mask == "none" or training.calculate_per_token_loss:
        return
    if other_micro_batch:
        yield (
            "loss_mask = uneven with another micro_batch_size needs calculate_per_token_loss (the mean over each micro "
            "batch's tokens is another loss)"
        )


def _finetune_needs(row: ResolvedRow) -> Iterator[str]:
    settings = row.case.settings
    training = row.case.training
    if settings.sequence_parallel_input_regather and not row.gathers_for_lora:
        yield "sequence_parallel_input_regather needs finetune = lora and sequence (there is nothing to gather)"
    if training.finetune == "none":
        return
    name = f"finetune = {training.finetune}"
    if not row.model.is_of_bridge or row.model.dataset != "mock":
        yield f"{name} needs a model with a recipe of Megatron-Bridge and dataset mock"
    # The mean over a micro batch's tokens is another loss where samples are of other lengths, or packed.
    if not training.calculate_per_token_loss or training.loss_mask != "none":
        yield f"{name} needs calculate_per_token_loss and loss_mask none (its prompts are left out as it is)"
    if row.case.precision == "fp8":
        yield f"{name} needs precision fp32 or bf16 (its model is Hugging Face's)"
    if training.packed and training.micro_batch_size > 1:
        yield f"{name} with packed needs micro_batch_size = 1 (Megatron-Bridge: when training with packed sequence)"


def _setting_needs(row: ResolvedRow) -> Iterator[str]:
    layout, settings, backend = row.case.layout, row.case.settings, row.case.settings.attention_backend
    local = row.model.layer_spec == "local"
    fp32 = row.case.precision == "fp32"
    if local != (backend == "local"):
        other = "local" if backend == "local" else "transformer-engine"
        yield f"attention_backend = {backend} needs layer_spec {other}"
    if backend in ("flash", "fused") and fp32:
        yield f"attention_backend = {backend} needs precision bf16 or fp8 (its kernels have no fp32)"
    # Transformer Engine splits contexts with flash and fused attention alone.
    if layout.context > 1 and not local and (fp32 or backend == "unfused"):
        yield "context > 1 needs precision bf16 or fp8 and an attention_backend other than unfused"
    if row.is_plain_recipe and row.model.recipe is None:
        yield 'recipe = "plain" needs a model with a recipe'
    if settings.loss_scale is not None and row.case.precision != "fp16":
        yield f"loss_scale = {settings.loss_scale:g} needs precision fp16"
    if not settings.grad_reduce_in_fp32 and row.case.precision == "fp32":
        yield "grad_reduce_in_fp32 = false needs precision bf16, fp16 or fp8"
    if settings.average_in_collective and row.case.training.calculate_per_token_loss:
        yield "average_in_collective needs calculate_per_token_loss = false (it divides by tokens, and not by ranks)"
    if settings.fp8_recipe is not None and row.case.precision != "fp8":
        yield f"fp8_recipe = {settings.fp8_recipe} needs precision fp8"
    if row.case.resume_at is not None and row.case.resume_at >= row.case.training.steps:
        yield f"resume_at {row.case.resume_at} must be less than steps {row.case.training.steps}"


def _graph_needs(row: ResolvedRow) -> Iterator[str]:
    """What a layer needs to be captured as a CUDA graph here; of some of it megatron-core has ways of its own."""
    case, settings = row.case, row.case.settings
    if settings.cuda_graph_impl == "none":
        return
    if row.model.layer_spec == "local":
        yield "cuda_graph_impl needs layer_spec transformer-engine"
    if case.layout.pipeline > 1:
        yield "cuda_graph_impl needs pipeline = 1"
    if case.training.packed or row.model.moe is not None or row.model.kind != "gpt":
        yield "cuda_graph_impl needs a model of kind gpt without experts, and no packed documents: equal sizes"
    if settings.recompute != "none" or case.resume_at is not None:
        yield "cuda_graph_impl needs recompute = none, and no resume_at"


def _local_needs(row: ResolvedRow) -> Iterator[str]:
    """What megatron-core's own layers do not have."""
    layout, settings, packed = row.case.layout, row.case.settings, row.case.training.packed
    if row.model.layer_spec != "local":
        if packed and (row.case.precision == "fp32" or settings.attention_backend == "unfused"):
            yield "packed needs precision bf16 or fp8 and an attention_backend other than unfused"
        return
    if row.case.precision == "fp8":
        yield "precision = fp8 needs layer_spec transformer-engine"
    # On the CPU smoke's driver of Megatron-Bridge has a small, slow attention of its own for it.
    if packed and not (row.case.training.packs_pairs and row.capabilities.device is Device.CPU):
        why = "megatron-core: Packed sequence is not supported by DotProductAttention"
        yield f"packed needs layer_spec transformer-engine ({why})"
    for name in ("apply_rope_fusion", "use_precision_aware_optimizer"):
        if getattr(settings, name):
            yield f"{name} needs layer_spec transformer-engine (it is Transformer Engine's)"
    if settings.cross_entropy_fusion == "te":
        yield "cross_entropy_fusion = te needs layer_spec transformer-engine"
    # Before 0.17 they are there with the package grouped_gemm, which no index has for a recent torch.
    if settings.moe_grouped_gemm:
        yield "moe_grouped_gemm needs layer_spec transformer-engine (megatron-core: Grouped GEMM is not available)"
    if row.model.mamba is not None and layout.context > 1:
        yield "context > 1 with a model of kind mamba-hybrid needs layer_spec transformer-engine"


def _capability_needs(row: ResolvedRow) -> Iterator[str]:
    settings, capabilities = row.case.settings, row.capabilities
    if capabilities.device is not Device.CUDA:
        yield from _needs_of_cuda(row)
    for package in _packages(row):
        if package not in capabilities.packages:
            yield f"it needs the package {package}, which the environment does not have"
    # CUDA writes "90a" for code of one generation alone and "100f" for that of a family.
    older = [sm for sm in capabilities.sm if int(sm.rstrip("af")) < FP8_LEAST_SM]
    if row.case.precision == "fp8" and older:
        yield f"precision = fp8 needs GPUs of SM {FP8_LEAST_SM} or newer; the target has SM {', '.join(older)}"
    older = [sm for sm in capabilities.sm if int(sm.rstrip("af")) < BLOCKWISE_LEAST_SM]
    if settings.fp8_recipe == "blockwise" and older:
        shown = ", ".join(older)
        yield f"fp8_recipe = blockwise needs GPUs of SM {BLOCKWISE_LEAST_SM} or newer; the target has SM {shown}"


def _needs_of_cuda(row: ResolvedRow) -> Iterator[str]:
    settings = row.case.settings
    # What megatron-core raises where it makes a stream of its own.
    streams = "torch.cuda.Stream requires CUDA support"
    if row.model.layer_spec == "transformer-engine":
        yield "layer_spec transformer-engine needs device cuda"
    elif row.model.mamba is not None:
        yield "a model of kind mamba-hybrid needs device cuda (mamba-ssm's kernels are Triton's)"
    if settings.num_distributed_optimizer_instances > 1:
        yield f"num_distributed_optimizer_instances > 1 needs device cuda ({streams})"
    if settings.moe_token_dispatcher_type == "alltoall":  # noqa: S105 - no password
        yield f"moe_token_dispatcher_type = alltoall needs device cuda ({streams})"


def _packages(row: ResolvedRow) -> Iterator[str]:
    settings = row.case.settings
    if row.model.layer_spec == "transformer-engine":
        yield "transformer-engine"
    if row.model.mamba is not None:
        yield "mamba-ssm"
    if settings.attention_backend == "flash":
        yield "flash-attn"
    # megatron-core 0.16.1 raises an ImportError without it.
    if settings.num_distributed_optimizer_instances > 1:
        yield "einops"
    # What frees its output asks Transformer Engine for the state of fp8 (tensor_parallel/random.py).
    if settings.recompute in ("layernorm", "moe_act", "mla_up_proj"):
        yield "transformer-engine"
    # Of these kernels of Apex, megatron-core raises an ImportError without them.
    if settings.gradient_accumulation_fusion or (settings.masked_softmax_fusion and _in_16_bits_of_its_own(row)):
        yield "apex"


def _in_16_bits_of_its_own(row: ResolvedRow) -> bool:
    """Whether megatron-core's own attention takes its softmax in 16 bits, for which alone its kernels are."""
    return row.model.layer_spec == "local" and row.case.precision != "fp32"


def _multiple(name: str, value: int, by: str, divisor: int) -> Iterator[str]:
    """That a value must be a multiple of another; with the divisors that it allows."""
    if value % divisor:
        allowed = [str(size) for size in range(1, min(value, LARGEST_LISTED) + 1) if value % size == 0]
        yield f"{name} {value} must be a multiple of {by} {divisor} (allowed: {', '.join(allowed)})"
