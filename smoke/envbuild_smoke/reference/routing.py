"""Which experts take a token, how much each counts, and the losses that balance them. Scores: [..., experts]."""

import math

import torch
from torch import Tensor

from envbuild_smoke.reference.config import ExpertsConfig
from envbuild_smoke.reference.rounding import kept_in_float32


@kept_in_float32
def route(logits: Tensor, experts: ExpertsConfig, bias: "Tensor | None" = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return how much each expert counts for each token, which were chosen, and the auxiliary losses' sum.

    `logits` has the shape [batch, sequence, experts]. Shazeer et al. 2017 (arXiv 1701.06538), equations 3 and 5
    without noise; softmax first: Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961), equation 1. With sigmoid
    scores DeepSeek-V3 (arXiv 2412.19437), equations 13 to 16; its published model.py has the factor (`route_scale`).
    `bias` is in the choice alone.
    """
    scores = logits.sigmoid() if experts.sigmoid else logits.softmax(-1)
    chosen = _chosen(scores if bias is None else scores + bias, experts)
    if experts.sigmoid:
        weights = scores * chosen
        weights = weights / weights.sum(-1, keepdim=True)
    elif experts.softmax_first:
        weights = scores * chosen
    else:
        weights = logits.masked_fill(chosen == 0, -math.inf).softmax(-1)
    return _within_capacity(weights * experts.factor, experts), chosen, _auxiliary(logits, scores, experts)


def _top(values: Tensor, count: int) -> Tensor:
    """Return 1 for the largest of each row and 0 for others."""
    return torch.zeros_like(values).scatter(-1, values.topk(count, dim=-1).indices, 1.0)


def _chosen(scores: Tensor, experts: ExpertsConfig) -> Tensor:
    """The best experts of each token; of the best groups, DeepSeek-V3, section 2.1.2 ("node-limited routing").

    A group is as good as the sum of its best experts, as many as a token has of each group.
    """
    if experts.groups is None or experts.groups_top_k is None:
        return _top(scores, experts.top_k)
    grouped = scores.unflatten(-1, (experts.groups, -1))
    best = grouped.topk(experts.top_k // experts.groups_top_k, dim=-1).values.sum(-1)
    allowed = _top(best, experts.groups_top_k)[..., None].expand_as(grouped).flatten(-2)
    return _top(scores.masked_fill(allowed == 0, -math.inf), experts.top_k)


def _within_capacity(weights: Tensor, experts: ExpertsConfig) -> Tensor:
    """Drop the tokens of an expert beyond its capacity: Fedus et al. 2021, equation 3; those that count least first.

    Equation 3 is for one expert a token; an equal share is of all choices, as in Lepikhin et al. 2020, "GShard" (arXiv
    2006.16668), section 2.2.
    """
    if experts.capacity is None:
        return weights
    tokens = weights.flatten(0, 1)
    most = math.ceil(len(tokens) * experts.top_k / experts.count * experts.capacity)
    kept = _top(tokens.T, min(most, len(tokens))).T
    return (tokens * kept).view_as(weights)


def _auxiliary(logits: Tensor, scores: Tensor, experts: ExpertsConfig) -> Tensor:
    """Fedus et al. 2021, equations 4 to 6, for top-k: f, the part of the tokens that an expert takes, divided by k."""
    probability = scores / scores.sum(-1, keepdim=True) if experts.sigmoid else scores
    # It is constant in the gradient, and of the scores alone: neither bias nor groups (DeepSeek-V3, equation 18).
    part = _top(scores.detach(), experts.top_k) / experts.top_k
    whole = (part.mean((0, 1)) * probability.mean((0, 1))).sum()
    # The same for each sequence by itself: DeepSeek-V3, equations 17 to 20.
    sequences = (part.mean(1) * probability.mean(1)).sum(-1).mean()
    # Zoph et al. 2022, "ST-MoE" (arXiv 2202.08906), equation 5.
    z = logits.logsumexp(-1).square().mean()
    balance = experts.auxiliary * whole + experts.sequence_auxiliary * sequences
    return experts.count * balance + experts.z * z


def moved_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The biases after a step in which each expert took `load` tokens: DeepSeek-V3, section 2.1.2.

    Up by the rate where an expert took fewer than the mean, down where it took more: Wang et al. 2024 (arXiv
    2408.15664), algorithm 1.
    """
    return bias + rate * (load.mean() - load).sign()
