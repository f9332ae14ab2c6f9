"""The rules of layouts and settings: what megatron-core refuses, and what trains wrongly without an error.

The only ones: the smoke runner runs the plan that these have passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.catalog.models import AttentionBackend, Device, LayerSpec, Normalization, Precision, Recompute
from envbuild.certify.cases.case import ResolvedRow

HEAD_SIZE_MULTIPLE = 8
# What the tensor cores take in fp8, along every side of a product of matrices. Heads of a multiple of 8 with as many
# queries as hidden_size have keys and values in that multiple too.
FP8_MULTIPLE = 16
FP8_LEAST_SM = 89
# With one or no entry on a tensor-parallel rank there is nothing to compare.
LEAST_VOCABULARY_PER_RANK = 2
# A Mamba layer is twice as wide inside, as megatron-core makes it.
MAMBA_EXPANSION = 2
PIPELINE_AXES = ("pipeline", "virtual_pipeline")
BATCH = "global_batch_size"
OVERLAP = "overlap_p2p_comm"


@dataclass(frozen=True, kw_only=True)
class BrokenRule:
    """A rule that a case breaks, and the values that could be changed to keep it.

    Attributes:
        axes: of the case itself.
        sizes: of the model or of the training, which other cases share.
        ground: that what it runs on cannot do it, whatever the shape.
    """

    text: str
    axes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    ground: bool = False


def broken_rules(row: ResolvedRow) -> list[BrokenRule]:
    """The rules of megatron-core's layouts that a case breaks: all that smoke refuses, and what trains wrongly."""
    sources = (_sizes, _batches, _expert_sizes, _mamba_sizes, _fp8_sizes, _shape_needs, _setting_needs, _ground_needs)
    return [rule for source in sources for rule in source(row)]


def _sizes(row: ResolvedRow) -> Iterator[BrokenRule]:
    spec, model = row.spec, row.model
    heads, groups, hidden = model.num_attention_heads, model.query_groups, model.hidden_size
    stages = spec.pipeline * spec.virtual_pipeline
    yield from _multiple("hidden_size", hidden, "num_attention_heads", heads, (), ("hidden_size",))
    yield from _multiple("num_attention_heads", heads, "num_query_groups", groups, (), ("num_query_groups",))
    words = "pipeline x virtual_pipeline ="
    yield from _multiple("num_layers", model.num_layers, words, stages, PIPELINE_AXES, ("num_layers",))
    split = [("num_attention_heads", heads), ("vocabulary_size", model.vocabulary_size)]
    if model.num_query_groups is not None:
        split.append(("num_query_groups", groups))
    for name, value in split:
        yield from _multiple(name, value, "tensor =", spec.tensor, ("tensor",), (name,))
    sequence = model.sequence_length
    if spec.context > 1:
        words = "2 x context ="
        yield from _multiple("sequence_length", sequence, words, 2 * spec.context, ("context",), ("sequence_length",))
    if spec.sequence and sequence % spec.context == 0:
        axes = ("tensor", "context")
        own = sequence // spec.context
        yield from _multiple("sequence_length / context", own, "tensor =", spec.tensor, axes, ("sequence_length",))
    if hidden % heads == 0 and (hidden // heads) % HEAD_SIZE_MULTIPLE:
        text = (
            f"hidden_size / num_attention_heads is {hidden // heads} and must be a multiple of {HEAD_SIZE_MULTIPLE} "
            "(no attention backend takes others)"
        )
        yield BrokenRule(text=text, sizes=("hidden_size",))
    least = LEAST_VOCABULARY_PER_RANK * spec.tensor
    if model.vocabulary_size < least:
        words = f"{LEAST_VOCABULARY_PER_RANK} x tensor = {least}"
        text = f"vocabulary_size {model.vocabulary_size} must be at least {words}"
        yield BrokenRule(text=text, axes=("tensor",), sizes=("vocabulary_size",))


def _batches(row: ResolvedRow) -> Iterator[BrokenRule]:
    spec = row.spec
    # A row with batches of its own can change them without the others.
    own = (
        *(("micro_batch_size",) if spec.micro_batch_size is not None else ()),
        *((BATCH,) if spec.global_batch_size is not None else ()),
    )
    shared = () if spec.global_batch_size is not None else (BATCH,)
    batch, samples = row.global_batch_size, row.micro_batch_size * spec.data
    yield from _multiple(BATCH, batch, "micro_batch_size x data =", samples, ("data", *own), shared)
    # The interleaved schedule works through micro batches in groups of the pipeline's size.
    if spec.virtual_pipeline > 1 and batch % samples == 0:
        axes = ("data", *PIPELINE_AXES, *own)
        count = batch // samples
        yield from _multiple("the number of micro batches", count, "pipeline =", spec.pipeline, axes, shared)


def _expert_sizes(row: ResolvedRow) -> Iterator[BrokenRule]:
    spec, experts = row.spec, row.model.moe
    if experts is None:
        if spec.expert > 1:
            yield BrokenRule(text=f"expert = {spec.expert} needs a model with experts (moe)", axes=("expert",))
        return
    axes = ("expert", "data", "context")
    yield from _multiple("data x context =", spec.data * spec.context, "expert =", spec.expert, axes, ())
    number = experts.num_experts
    yield from _multiple("num_experts", number, "expert =", spec.expert, ("expert",), ("num_experts",))
    if experts.router_topk > number:
        text = f"router_topk {experts.router_topk} must be at most num_experts {number}"
        yield BrokenRule(text=text, sizes=("num_experts",))
    if spec.tensor > 1 and not spec.sequence:
        text = "tensor > 1 with experts needs sequence (megatron-core refuses to train them without)"
        yield BrokenRule(text=text, axes=("sequence", "tensor"))


def _mamba_sizes(row: ResolvedRow) -> Iterator[BrokenRule]:
    spec, model, mamba = row.spec, row.model, row.model.mamba
    if mamba is None:
        return
    layers = len(mamba.hybrid_override_pattern)
    if layers != model.num_layers:
        text = (
            f"hybrid_override_pattern has {layers} letters and must have one for each of num_layers {model.num_layers}"
        )
        yield BrokenRule(text=text, sizes=("num_layers",))
    inner, groups, axes = MAMBA_EXPANSION * model.hidden_size, mamba.num_groups, ("tensor", "context")
    yield from _multiple(
        f"{MAMBA_EXPANSION} x hidden_size =", inner, "mamba.head_dim", mamba.head_dim, (), ("hidden_size",)
    )
    heads = inner // mamba.head_dim
    name = f"{MAMBA_EXPANSION} x hidden_size / mamba.head_dim ="
    yield from _multiple(name, heads, "tensor x context =", spec.tensor * spec.context, axes, ())
    yield from _multiple(name, heads, "mamba.num_groups", groups, (), ())
    yield from _multiple("mamba.num_groups", groups, "tensor =", spec.tensor, ("tensor",), ())
    own = groups // spec.tensor
    if groups % spec.tensor == 0 and own % spec.context and spec.context % own:
        text = f"mamba.num_groups / tensor is {own} and must be a multiple or a divisor of context = {spec.context}"
        yield BrokenRule(text=text, axes=axes)
    if spec.virtual_pipeline > 1:
        yield BrokenRule(text="virtual_pipeline > 1 needs a model of kind gpt", axes=("virtual_pipeline",))
    if spec.recompute is Recompute.FULL:
        text = "recompute = full needs a model of kind gpt (megatron-core's Mamba layers leave it out without a word)"
        yield BrokenRule(text=text, axes=("recompute",))


def _fp8_sizes(row: ResolvedRow) -> Iterator[BrokenRule]:
    spec, model = row.spec, row.model
    if spec.precision is not Precision.FP8:
        return
    hidden, mamba = model.hidden_size, model.mamba
    words = "what fp8 takes,"
    share = ("tensor",)
    if hidden % spec.tensor == 0:
        own = hidden // spec.tensor
        yield from _multiple("hidden_size / tensor =", own, words, FP8_MULTIPLE, share, ("hidden_size",))
    parts = spec.context * (spec.tensor if spec.sequence else 1)
    if model.sequence_length % parts == 0:
        tokens = model.sequence_length // parts * row.micro_batch_size
        name, axes = "tokens of a micro batch on a rank =", ("tensor", "context")
        yield from _multiple(name, tokens, words, FP8_MULTIPLE, axes, ("sequence_length",))
    if mamba is not None and hidden * MAMBA_EXPANSION % mamba.head_dim == 0:
        inner = MAMBA_EXPANSION * hidden
        width = 2 * inner + 2 * mamba.num_groups * mamba.state_dim + inner // mamba.head_dim
        if width % spec.tensor == 0:
            name = "the width of a Mamba layer's input projection / tensor ="
            yield from _multiple(name, width // spec.tensor, words, FP8_MULTIPLE, share, ("hidden_size",))


def _shape_needs(row: ResolvedRow) -> Iterator[BrokenRule]:
    spec, model = row.spec, row.model
    local = model.layer_spec is LayerSpec.LOCAL
    interleaved, overlap = spec.virtual_pipeline > 1, row.overlap_p2p_comm
    if interleaved and spec.pipeline == 1:
        yield BrokenRule(text="virtual_pipeline needs pipeline > 1", axes=PIPELINE_AXES)
    axes = (OVERLAP, *PIPELINE_AXES)
    if interleaved and spec.pipeline == 2 and not overlap:
        text = (
            "virtual_pipeline with pipeline = 2 needs overlap_p2p_comm (with batched sends the next and the previous "
            "stage are one rank, and activations are taken for gradients: it trains, and it is wrong)"
        )
        yield BrokenRule(text=text, axes=axes)
    if overlap and spec.pipeline > 1 and not interleaved:
        yield BrokenRule(text="overlap_p2p_comm with pipeline > 1 needs virtual_pipeline > 1", axes=axes)
    if spec.sequence and spec.tensor == 1:
        yield BrokenRule(text="sequence needs tensor > 1", axes=("sequence", "tensor"))
    if spec.sequence and local and model.normalization is not Normalization.RMS:
        text = (
            'sequence with layer_spec local needs normalization "RMSNorm" (torch\'s LayerNorm has no sequence parallel)'
        )
        yield BrokenRule(text=text, axes=("sequence",), sizes=("normalization",))
    # On the CPU smoke's driver has an attention of its own, slow and small, to have this layout at all.
    if spec.context > 1 and local and row.ground.device is Device.CUDA:
        text = "context > 1 needs layer_spec transformer-engine (megatron-core's own attention has no context parallel)"
        yield BrokenRule(text=text, axes=("context",))
    if spec.distributed_optimizer and spec.data * spec.context == 1:
        text = "distributed_optimizer needs data x context > 1 (there is nothing to shard it over)"
        yield BrokenRule(text=text, axes=("distributed_optimizer", "data"))


def _setting_needs(row: ResolvedRow) -> Iterator[BrokenRule]:
    spec, backend = row.spec, row.attention_backend
    local = row.model.layer_spec is LayerSpec.LOCAL
    fp32 = spec.precision is Precision.FP32
    axes = ("attention_backend",)
    if local != (backend is AttentionBackend.LOCAL):
        other = "local" if backend is AttentionBackend.LOCAL else "transformer-engine"
        yield BrokenRule(text=f"attention_backend = {backend.value} needs layer_spec {other}", axes=axes)
    if backend in (AttentionBackend.FLASH, AttentionBackend.FUSED) and fp32:
        text = f"attention_backend = {backend.value} needs precision bf16 or fp8 (its kernels have no fp32)"
        yield BrokenRule(text=text, axes=axes)
    if spec.context > 1 and not local and (fp32 or backend is AttentionBackend.UNFUSED):
        text = "context > 1 needs precision bf16 or fp8 and an attention_backend other than unfused"
        yield BrokenRule(text=text, axes=("context", *axes))
    if spec.precision is Precision.FP8 and local:
        yield BrokenRule(text="precision = fp8 needs layer_spec transformer-engine")
    if row.model.mamba is not None and local:
        yield BrokenRule(text="a model of kind mamba-hybrid needs layer_spec transformer-engine")
    if spec.resume_at is not None and spec.resume_at >= row.training.steps:
        text = f"resume_at {spec.resume_at} must be less than steps {row.training.steps}"
        yield BrokenRule(text=text, axes=("resume_at",))


def _ground_needs(row: ResolvedRow) -> Iterator[BrokenRule]:
    spec, ground = row.spec, row.ground
    packages = []
    if row.model.layer_spec is LayerSpec.TRANSFORMER_ENGINE:
        if ground.device is not Device.CUDA:
            yield BrokenRule(text="layer_spec transformer-engine needs device cuda", ground=True)
        packages.append("transformer-engine")
    if row.model.mamba is not None:
        packages.append("mamba-ssm")
    if row.attention_backend is AttentionBackend.FLASH:
        packages.append("flash-attn")
    for package in packages:
        if package not in ground.packages:
            text = f"it needs the package {package}, which the environment does not have"
            yield BrokenRule(text=text, ground=True)
    older = [sm for sm in ground.sm if int(sm.rstrip("af")) < FP8_LEAST_SM]
    if spec.precision is Precision.FP8 and older:
        text = f"precision = fp8 needs GPUs of SM {FP8_LEAST_SM} or newer; the target has SM {', '.join(older)}"
        yield BrokenRule(text=text, ground=True)


def _multiple(
    name: str, value: int, by: str, divisor: int, axes: tuple[str, ...], sizes: tuple[str, ...]
) -> Iterator[BrokenRule]:
    """That a value must be a multiple of another, with their names as they stand in a sentence."""
    if value % divisor:
        yield BrokenRule(text=f"{name} {value} must be a multiple of {by} {divisor}", axes=axes, sizes=sizes)
