"""What the plan's model is, for the reference; from the plan alone, not from what the library built."""

from envbuild_smoke.plan.architecture import Latent, Moe
from envbuild_smoke.plan.models import Model
from envbuild_smoke.reference.config import ExpertsConfig, LatentConfig, MambaConfig, ModelConfig, Positions
from envbuild_smoke.reference.positions import RotaryConfig


def model_config(model: Model) -> ModelConfig:
    """Return the model as the reference has it."""
    mamba, own = model.mamba, model.architecture
    positions: Positions = "none" if mamba is not None else "rotary" if model.is_llama else "learned"
    layers = None
    if mamba is not None:
        layers = MambaConfig(state_size=mamba.state_dim, head_size=mamba.head_dim, groups=mamba.num_groups)
    return ModelConfig(
        layers="T" * model.num_layers if mamba is None else mamba.hybrid_override_pattern,
        hidden_size=model.hidden_size,
        heads=model.num_attention_heads,
        query_groups=model.num_query_groups,
        normalization=model.normalization,
        norm_epsilon=model.norm_epsilon,
        positions=positions,
        rotary=RotaryConfig(
            base=own.rotary_base,
            part=own.rotary_percent,
            scaling=own.rope_scaling,
            factor=own.rope_scaling_factor,
            original_length=own.original_max_position_embeddings,
            of_scores=model.mla is not None,
        ),
        qk_norm=own.qk_layernorm,
        window=own.window_size,
        windowless=own.window_attn_skip_freq,
        sinks={"vanilla": None, "off-by-one": "zero", "learnable": "learnt"}[own.softmax_type],
        activation=model.activation,
        clamp=own.activation_func_clamp_value,
        linear_offset=own.glu_linear_offset,
        bias=model.has_bias,
        qkv_bias=model.has_bias or model.qkv_bias,
        tied=own.share_embeddings_and_output_weights,
        experts=None if model.moe is None else _experts(model, model.moe),
        latent=None if model.mla is None else _latent(model.mla),
        predicted=own.mtp_num_layers or 0,
        predicted_weight=own.mtp_loss_scaling_factor,
        mamba=layers,
    )


def _latent(mla: Latent) -> LatentConfig:
    return LatentConfig(rank=mla.kv_lora_rank, size=mla.qk_head_dim, rotated=mla.qk_pos_emb_head_dim)


def _experts(model: Model, moe: Moe) -> ExpertsConfig:
    kind, coefficient = moe.router_load_balancing_type, moe.aux_loss_coeff
    return ExpertsConfig(
        count=moe.num_experts,
        top_k=moe.router_topk,
        bias=model.has_bias,
        softmax_first=moe.router_topk == 1,
        sigmoid=moe.router_score_function == "sigmoid",
        bias_rate=moe.router_bias_update_rate if moe.router_enable_expert_bias else None,
        groups=moe.router_num_groups,
        groups_top_k=moe.router_group_topk,
        factor=moe.router_topk_scaling_factor or 1.0,
        shared=moe.shared_expert_intermediate_size is not None,
        dense_layers=moe.first_dense_layers,
        capacity=moe.expert_capacity_factor,
        auxiliary=coefficient if kind == "aux_loss" else 0.0,
        sequence_auxiliary=coefficient if kind == "seq_aux_loss" else 0.0,
        z=moe.z_loss_coeff,
    )
