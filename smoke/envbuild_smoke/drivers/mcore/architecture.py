"""A model's architecture as megatron-core takes it: in its configuration, and in its GPTModel."""

import torch
from megatron.core import activations
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from envbuild_smoke.drivers.parts import Options
from envbuild_smoke.plan.architecture import Latent, Moe
from envbuild_smoke.plan.models import Model

_ACTIVATIONS = {
    "gelu": torch.nn.functional.gelu,
    "swiglu": torch.nn.functional.silu,
    "squared_relu": activations.squared_relu,
    "quick_geglu": quick_gelu,
}


def config_options(model: Model) -> Options:
    """Return options of TransformerConfig; those that not every release has only where a model needs them."""
    own = model.architecture
    options: Options = {
        "kv_channels": own.kv_channels,
        "qk_layernorm": own.qk_layernorm,
        "add_bias_linear": model.has_bias,
        "add_qkv_bias": model.qkv_bias,
        "activation_func": _ACTIVATIONS[model.activation],
        "gated_linear_unit": model.activation in ("swiglu", "quick_geglu"),
        "init_method_std": own.init_method_std,
    }
    if own.mtp_num_layers is not None:
        options.update(mtp_num_layers=own.mtp_num_layers, mtp_loss_scaling_factor=own.mtp_loss_scaling_factor)
    if model.mla is not None:
        options.update(_latent_options(model, model.mla))
    if own.window_size is not None:
        options["window_size"] = (own.window_size, 0)
    for name, plain in (
        ("window_attn_skip_freq", None),
        ("softmax_type", "vanilla"),
        ("activation_func_clamp_value", None),
        ("glu_linear_offset", 0.0),
    ):
        if getattr(own, name) != plain:
            options[name] = getattr(own, name)
    return options


def config_class(model: Model) -> type[TransformerConfig]:
    """Return the class of a model's configuration."""
    chosen: type[TransformerConfig] = TransformerConfig if model.mla is None else MLATransformerConfig
    return chosen


def _latent_options(model: Model, mla: Latent) -> Options:
    own = model.architecture
    return {
        **vars(mla),
        "multi_latent_attention": True,
        # The size of what a head gives: megatron-core's own attention asks for no other.
        "kv_channels": mla.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "yarn" if own.rope_scaling == "yarn" else "rope",
        "rotary_base": own.rotary_base,
        "rotary_scaling_factor": own.rope_scaling_factor,
        "original_max_position_embeddings": own.original_max_position_embeddings,
        "mscale": 1.0,
        "mscale_all_dim": 1.0 if own.rope_scaling == "yarn" else 0.0,
    }


def expert_parts(model: Model, moe: Moe) -> Options:
    """Return options of what experts and their router are made of."""
    options: Options = {
        "moe_router_score_function": moe.router_score_function,
        "moe_router_enable_expert_bias": moe.router_enable_expert_bias,
        "moe_router_bias_update_rate": moe.router_bias_update_rate,
        "moe_router_num_groups": moe.router_num_groups,
        "moe_router_group_topk": moe.router_group_topk,
        "moe_router_topk_scaling_factor": moe.router_topk_scaling_factor,
        "moe_shared_expert_intermediate_size": moe.shared_expert_intermediate_size,
        "moe_expert_capacity_factor": moe.expert_capacity_factor,
        "moe_layer_freq": [0] * moe.first_dense_layers + [1] * (model.num_layers - moe.first_dense_layers),
    }
    if moe.ffn_hidden_size is not None:
        options["moe_ffn_hidden_size"] = moe.ffn_hidden_size
    return options


def add_yarn(config: TransformerConfig, model: Model) -> None:
    """Give a configuration what GPTModel asks it for, and no release has as fields: as Megatron-Bridge's GPT-OSS."""
    own = model.architecture
    if own.rope_scaling != "yarn" or model.mla is not None:
        return
    config.yarn_rotary_scaling_factor = own.rope_scaling_factor
    config.yarn_original_max_position_embeddings = own.original_max_position_embeddings
    config.yarn_beta_fast, config.yarn_beta_slow = 32.0, 1.0
    config.yarn_mscale, config.yarn_mscale_all_dim = 1.0, 0.0
    config.yarn_correction_range_round_to_int = False


def gpt_options(model: Model) -> Options:
    """Return options of GPTModel."""
    own = model.architecture
    options: Options = {"share_embeddings_and_output_weights": own.share_embeddings_and_output_weights}
    if not model.is_llama:
        return {**options, "position_embedding_type": "learned_absolute"}
    return {
        **options,
        # Multi-latent attention has its own.
        "position_embedding_type": "yarn" if own.rope_scaling == "yarn" and model.mla is None else "rope",
        "rotary_base": own.rotary_base,
        "rotary_percent": own.rotary_percent,
        "rope_scaling": own.rope_scaling == "llama3",
        "rope_scaling_factor": own.rope_scaling_factor,
    }
