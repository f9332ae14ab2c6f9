"""The formulas of the layers. Tensors have the shape [batch, sequence, ...]; `same` is `may_attend`'s."""

import math

import torch
from torch import Tensor

from envbuild_smoke.reference.config import MambaConfig, ModelConfig
from envbuild_smoke.reference.rounding import kept_in_float32, one_operation


@one_operation
def layer_norm(values: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Ba et al. 2016, "Layer Normalization" (arXiv 1607.06450), equations 3 and 4; epsilon as in torch.nn.LayerNorm."""
    centred = values - values.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight + bias


@one_operation
def rms_norm(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Zhang & Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv 1910.07467), equation 4."""
    return values / (values.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def may_attend(length: int, segments: "Tensor | None", device: torch.device) -> Tensor:
    """Return which token (row) sees which (column), shape [1 or batch, sequence, sequence].

    Those before it and itself (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.3); of packed sequences
    (`segments`, [batch, sequence], numbers the sequence of each token) those of its own (Krell et al. 2021, arXiv
    2107.02027, section 3.2.2).
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None]
    return causal if segments is None else causal & (segments[:, :, None] == segments[:, None, :])


def within_window(same: Tensor, window: int) -> Tensor:
    """Of what a token may attend to the `window` tokens before it and itself: Jiang et al. 2023 (arXiv 2310.06825).

    That is section 2, "sliding window attention", with a window that leaves the token itself out of the count, as
    megatron-core's and FlashAttention's `window_size` do.
    """
    return same & torch.ones_like(same).triu(-window)


def positions_of(length: int, segments: "Tensor | None", device: torch.device) -> Tensor:
    """Return the position of each token in its own sequence, shape [1 or batch, sequence]."""
    # A token sees the tokens before it in its sequence, and itself.
    return may_attend(length, segments, device).sum(-1) - 1


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    same: Tensor,
    sinks: "Tensor | None" = None,
    factor: float = 1.0,
) -> Tensor:
    """Return the context, [batch, sequence, heads x head size], of [batch, sequence, heads, head size].

    Vaswani et al. 2017 (arXiv 1706.03762), equation 1. Neighbouring heads share keys and values where there are fewer
    of those: Ainslie et al. 2023, "GQA" (arXiv 2305.13245), section 2.2. `sinks`, [heads], are one more score each, of
    no token: OpenAI 2025, "gpt-oss" (arXiv 2508.10925), section 2; with zeros Xiao et al. 2023 (arXiv 2309.17453),
    equation 2. Scores are multiplied by `factor`.
    """
    share = queries.size(2) // keys.size(2)
    keys, values = (part.repeat_interleave(share, dim=2) for part in (keys, values))
    scores = torch.einsum("bihd,bjhd->bhij", queries, keys) / math.sqrt(queries.size(-1)) * factor
    scores = scores.masked_fill(~same[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : keys.size(1)]
    return torch.einsum("bhij,bjhd->bihd", weights, values).flatten(2)


def silu(values: Tensor) -> Tensor:
    """The sigmoid-weighted linear unit: Elfwing et al. 2017 (arXiv 1702.03118), section 2."""
    return values * torch.sigmoid(values)


@one_operation
def activate(values: Tensor, config: ModelConfig) -> Tensor:
    """What is between the linear layers of an MLP; the first half of gated values is the gate.

    GELU, Hendrycks & Gimpel 2016 (arXiv 1606.08415), section 2, and its form x sigmoid(1.702 x) there; SwiGLU, Shazeer
    2020 (arXiv 2002.05202), equation 6; the squared ReLU, So et al. 2021, "Primer" (arXiv 2109.08668), section 4.
    The clamped gate and the offset are GPT-OSS's: Hugging Face's `GptOssExperts` with `limit` and `(up + 1) * glu`.
    """
    if config.activation == "gelu":
        return values * 0.5 * (1 + torch.erf(values / math.sqrt(2)))
    if config.activation == "squared_relu":
        return values.relu().square()
    gate, linear = values.chunk(2, dim=-1)
    if config.clamp is not None:
        # Only what is large is cut off of the gate.
        gate, linear = gate.clamp(max=config.clamp), linear.clamp(-config.clamp, config.clamp)
    gate = silu(gate) if config.activation == "swiglu" else gate * torch.sigmoid(1.702 * gate)
    return gate * (linear + config.linear_offset)


@one_operation
def causal_convolution(values: Tensor, weight: Tensor, bias: Tensor, same: Tensor) -> Tensor:
    """Each channel of `values` by itself, over the token and those before it; `weight` has shape [channels, 1, width].

    Gu & Dao 2023, "Mamba" (arXiv 2312.00752), section 3.4 and figure 3.
    """
    width, length = weight.size(-1), values.size(1)
    total = bias.expand_as(values)
    for back in range(min(width, length)):
        # Of another packed sequence nothing is taken.
        inside = same.diagonal(-back, 1, 2)[..., None].to(values.dtype)
        moved = values[:, : length - back] * inside * weight[:, 0, width - 1 - back]
        total = total + torch.nn.functional.pad(moved, (0, 0, back, 0))
    return total


@one_operation
def state_space(inputs: Tensor, steps: Tensor, decay: Tensor, pair: tuple[Tensor, Tensor], same: Tensor) -> Tensor:
    """The selective state space model in its quadratic form, of `inputs` [batch, sequence, heads, head size].

    Dao & Gu 2024, "Transformers are SSMs" (arXiv 2405.21060), equations 1 and 6 (the matrix M) and listing 1's L, with
    the discretization of Mamba-2, exp(step x decay) and step x B. `steps` has shape [batch, sequence, heads], `decay`
    [heads]; `pair` is B and C, each [batch, sequence, groups, state size], shared by neighbouring heads.
    """
    share = inputs.size(2) // pair[0].size(2)
    enter, leave = (part.repeat_interleave(share, dim=2) for part in pair)
    total = (steps * decay).cumsum(1).transpose(1, 2)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~same[:, None], -math.inf).exp()
    weights = torch.einsum("bihn,bjhn->bhij", leave, enter) * between
    return torch.einsum("bhij,bjh,bjhp->bihp", weights, steps, inputs)


@one_operation
def gated_group_norm(values: Tensor, gate: Tensor, weight: Tensor, mamba: MambaConfig) -> Tensor:
    """The norm of a Mamba-2 block: gated first, then RMSNorm by group; Dao & Gu 2024, section 7.1 and figure 6."""
    gated = values * silu(gate)
    grouped = gated.unflatten(-1, (mamba.groups, -1))
    ones = torch.ones_like(grouped[0, 0, 0])
    return rms_norm(grouped, ones, mamba.norm_epsilon).flatten(-2) * weight


@kept_in_float32
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood of each label, [batch, sequence].

    Goodfellow et al. 2016, "Deep Learning", section 6.2.2.3.
    """
    return logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]
