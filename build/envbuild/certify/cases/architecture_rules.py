"""The rules of what models are made of: what megatron-core, or the runner's attention on CPUs, does not have."""

from __future__ import annotations

from collections.abc import Iterator

from envbuild.certify.cases.case import ResolvedRow
from envbuild_smoke.plan.architecture import PLAIN, Moe


def architecture_needs(row: ResolvedRow) -> Iterator[str]:
    """What a model's architecture and its latent attention need."""
    model, own = row.model, row.model.architecture
    if own == PLAIN and model.mla is None:
        return
    if model.recipe is not None:
        yield "architecture and mla need a model without a recipe (which has its own)"
    if model.kind != "gpt" or model.normalization != "RMSNorm":
        yield 'architecture and mla need kind gpt and normalization "RMSNorm" (rotary positions)'
    if own.window_attn_skip_freq is not None and own.window_size is None:
        yield "window_attn_skip_freq needs window_size"
    if own.mtp_num_layers is not None and row.case.training.loss_mask != "none":
        yield "mtp_num_layers needs loss_mask none (nothing says which further tokens count)"
    if model.mla is not None and model.num_query_groups is not None:
        yield "mla needs no num_query_groups (each head has its own keys)"
    if model.layer_spec == "local":
        yield from _local_needs(row)


def _local_needs(row: ResolvedRow) -> Iterator[str]:
    model, own = row.model, row.model.architecture
    has_parts = model.mla is not None or own.window_size is not None or own.softmax_type != "vanilla"
    if has_parts and row.case.layout.context > 1:
        yield "context > 1 with mla, window_size or softmax_type needs layer_spec transformer-engine"
    if own.add_bias_linear and model.moe is not None:
        yield "add_bias_linear with experts needs layer_spec transformer-engine (megatron-core: modified inplace)"


def router_needs(row: ResolvedRow, moe: Moe) -> Iterator[str]:
    """What routers need of their experts, and of a layout."""
    groups, chosen = moe.router_num_groups, moe.router_group_topk
    if (groups is None) != (chosen is None):
        yield "router_num_groups and router_group_topk need each other"
    elif groups is not None and chosen is not None and (moe.num_experts % groups or moe.router_topk % chosen):
        yield "num_experts must be a multiple of router_num_groups, and router_topk of router_group_topk"
    if moe.router_enable_expert_bias and moe.router_score_function != "sigmoid":
        yield "router_enable_expert_bias needs router_score_function = sigmoid"
    if moe.first_dense_layers >= row.model.num_layers:
        yield f"first_dense_layers {moe.first_dense_layers} must be less than num_layers {row.model.num_layers}"
    layout, training = row.case.layout, row.case.training
    if moe.expert_capacity_factor is None:
        return
    if layout.tensor * layout.context > 1 or training.micro_batch_size != row.matrix_training.micro_batch_size:
        yield (
            "expert_capacity_factor needs tensor x context = 1 and the matrix's micro_batch_size (tokens are dropped "
            "among those of a rank's micro batch)"
        )
