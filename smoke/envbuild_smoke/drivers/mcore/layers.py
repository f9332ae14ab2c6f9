"""The layers of a model: Transformer Engine's or megatron-core's own, and norms of torch's for the latter."""

import sys
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from envbuild_smoke.drivers.mcore.attention import ContextParallelAttention, LatentAttention
from envbuild_smoke.drivers.parts import Options
from envbuild_smoke.plan.models import Model


def gpt_layer_spec(
    config: TransformerConfig, model: Model, stage: "int | None"
) -> "ModuleSpec | TransformerBlockSubmodules":
    """Return the layers of a GPT."""
    if model.layer_spec == "transformer-engine":
        if model.moe is not None and model.moe.first_dense_layers:
            return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
        return get_gpt_layer_with_transformer_engine_spec(**_parts(config, model, sparse=True))
    first, norm = get_transformer_layer_offset(config, vp_stage=stage), _norm(model)
    dense = 0 if model.moe is None else model.moe.first_dense_layers
    # Left to itself, the norm after the last layer is Transformer Engine's or Apex's where they are installed.
    return TransformerBlockSubmodules(
        layer_specs=[
            _local_layer(config, model, sparse=index >= dense)
            for index in range(first, first + get_num_layers_to_build(config, vp_stage=stage))
        ],
        layer_norm=norm,
    )


def prediction_spec(
    config: TransformerConfig, model: Model, layers: "ModuleSpec | TransformerBlockSubmodules", stage: "int | None"
) -> Any:
    """Return the layers of a GPT that predict further tokens; None on a stage without them."""
    if model.architecture.mtp_num_layers is None:
        return None
    engine = model.layer_spec == "transformer-engine"
    block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=engine, vp_stage=stage)
    if block is not None and not engine:
        norm = _norm(model)
        for layer in block.layer_specs:
            layer.submodules = replace(layer.submodules, enorm=norm, hnorm=norm, layer_norm=norm)
    return block


def _parts(config: TransformerConfig, model: Model, *, sparse: bool) -> Options:
    return {
        "num_experts": model.moe.num_experts if model.moe is not None and sparse else None,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }


def _local_layer(config: TransformerConfig, model: Model, *, sparse: bool) -> ModuleSpec:
    """Return a layer of megatron-core's own, with torch's norms."""
    spec = get_gpt_layer_local_spec(normalization=model.normalization, **_parts(config, model, sparse=sparse))
    norm = _norm(model)
    spec.submodules = replace(spec.submodules, input_layernorm=norm, pre_mlp_layernorm=norm)
    attention = spec.submodules.self_attention
    own: Options = {}
    if model.mla is not None:
        own = {"q_layernorm": norm, "kv_layernorm": norm, "core_attention": LatentAttention}
    elif config.qk_layernorm:
        own = {"q_layernorm": norm, "k_layernorm": norm}
    if config.context_parallel_size > 1:
        own["core_attention"] = ContextParallelAttention
    attention.submodules = replace(attention.submodules, **own)
    return spec


def mamba_stack_spec(model: Model) -> ModuleSpec:
    """Return the layers of a Mamba hybrid model: Transformer Engine's, as megatron-core has them, or its own.

    Those are made of what a GPT has of its own, as for ModelOpt (post_training/modelopt/mamba/model_specs.py).
    """
    # These import mamba_ssm, which a stack without such models need not have.
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as engine

    if model.layer_spec == "transformer-engine":
        return engine
    parts, norm = engine.submodules, _norm(model)
    local = get_gpt_layer_local_spec(normalization=model.normalization).submodules
    mixer = parts.mamba_layer.submodules.mixer
    own = replace(mixer.submodules, in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    stack = ModuleSpec(
        module=engine.module,
        submodules=replace(
            parts,
            mamba_layer=_with(parts.mamba_layer, norm=norm, mixer=ModuleSpec(module=mixer.module, submodules=own)),
            attention_layer=_with(parts.attention_layer, input_layernorm=norm, self_attention=local.self_attention),
            mlp_layer=_with(parts.mlp_layer, pre_mlp_layernorm=norm, mlp=local.mlp),
        ),
    )
    # The norm after the last layer is Transformer Engine's whatever the spec says (ssm/mamba_block.py).
    vars(sys.modules[engine.module.__module__])["TENorm"] = norm
    return stack


def _with(layer: ModuleSpec, **submodules: Any) -> ModuleSpec:
    """Return a layer with other parts."""
    return ModuleSpec(module=layer.module, submodules=replace(layer.submodules, **submodules))


def _norm(model: Model) -> "type[RMSNorm | LayerNorm]":
    return RMSNorm if model.normalization == "RMSNorm" else LayerNorm


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """torch's RMSNorm under sequence parallelism, which Megatron's own wrapper of it refuses.

    Each tensor-parallel rank normalizes its part of the sequence, so the gradients of the weight have to be
    summed over them. The mark on the weight makes Megatron do that.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_options: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


class LayerNorm(torch.nn.LayerNorm):  # type: ignore[misc]
    """torch's LayerNorm under sequence parallelism, as `RMSNorm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_options: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias.sequence_parallel = config.sequence_parallel
