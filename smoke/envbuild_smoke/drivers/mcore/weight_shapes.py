"""The shapes that weights have by the plan's sizes: the reference computes with weights of any."""

import re
from collections.abc import Iterator, Mapping

import torch

from envbuild_smoke.plan.models import Model

_GATED = ("swiglu", "quick_geglu")


def shape_problem(weights: Mapping[str, torch.Tensor], model: Model) -> "str | None":
    """Return the first of a whole model's weights that has another shape than the plan says; None where all have it.

    Of weights that are named as in the reference.
    """
    expected = list(_shapes(model))
    for name, weight in weights.items():
        for pattern, shape in expected:
            if re.search(pattern, name) and tuple(weight.shape) != shape:
                return f"{name} has the shape {tuple(weight.shape)}, and the plan's sizes give {shape}"
    return None


def _shapes(model: Model) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield patterns of names with [outputs, inputs]; linear layers that are gated have two outputs for each."""
    hidden = model.hidden_size
    yield r"^(embedding\.word_embeddings|output_layer)\.weight$", (model.vocabulary_size, hidden)
    yield r"^embedding\.position_embeddings\.weight$", (model.sequence_length, hidden)
    yield from _attention(model)
    moe = model.moe
    # What megatron-core makes of a configuration without a width.
    widths = {r"\.mlp": 4 * hidden}
    if moe is not None:
        widths[r"\.local_experts\.\d+"] = moe.ffn_hidden_size or 4 * hidden
        widths[r"\.shared_experts"] = moe.shared_expert_intermediate_size or 0
        yield r"\.mlp\.router\.weight$", (moe.num_experts, hidden)
    for pattern, width in widths.items():
        yield rf"{pattern}\.linear_fc1\.weight$", ((1 + (model.activation in _GATED)) * width, hidden)
        yield rf"{pattern}\.linear_fc2\.weight$", (hidden, width)


def _attention(model: Model) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, heads, mla = model.hidden_size, model.num_attention_heads, model.mla
    if mla is None:
        size = model.architecture.kv_channels or hidden // heads
        yield r"\.linear_qkv\.weight$", ((heads + 2 * model.num_query_groups) * size, hidden)
        yield r"\.linear_proj\.weight$", (hidden, heads * size)
        return
    rotated = mla.qk_pos_emb_head_dim
    yield r"\.linear_q_down_proj\.weight$", (mla.q_lora_rank, hidden)
    yield r"\.linear_q_up_proj\.weight$", (heads * (mla.qk_head_dim + rotated), mla.q_lora_rank)
    yield r"\.linear_kv_down_proj\.weight$", (mla.kv_lora_rank + rotated, hidden)
    yield r"\.linear_kv_up_proj\.weight$", (heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    yield r"\.linear_proj\.weight$", (hidden, heads * mla.v_head_dim)
