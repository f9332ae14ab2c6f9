"""Rotary positions: the angle of each pair, and how it is stretched for longer sequences."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from envbuild_smoke.reference.rounding import one_operation

Scaling = Literal["none", "llama3", "yarn"]
# Of Llama 3.1 (`low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings` of its Hugging Face config).
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192
# The defaults of YaRN (section 3.2: alpha and beta for the Llama family), which GPT-OSS has too.
_YARN_SLOW, _YARN_FAST = 1.0, 32.0


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """The rotation of queries and keys: `part` of a head by `base`; `original_length` is YaRN's.

    With `of_scores`, as in DeepSeek-V3, YaRN's factor is on the scores and not on what is rotated, and its ramp goes
    over whole pairs.
    """

    base: float = 10000.0
    part: float = 1.0
    scaling: Scaling = "none"
    factor: float = 8.0
    original_length: int = 4096
    of_scores: bool = False


@one_operation
def rotate(values: Tensor, positions: Tensor, config: RotaryConfig) -> Tensor:
    """Rotary positions of `values`, shape [batch, sequence, heads, head size].

    Su et al. 2021, "RoFormer" (arXiv 2104.09864), equation 34, with the pairs (i, i + half) in the place of
    (2i, 2i + 1), as in GPT-NeoX (Black et al. 2022, arXiv 2204.06745) and Llama. With a part, the first elements of a
    head are rotated (section 2.1 there).
    """
    size = int(values.size(-1) * config.part)
    turned, rest = values[..., :size], values[..., size:]
    frequencies = _scaled(config, _frequencies(config, size, values))
    angles = (positions.to(values.dtype)[..., None] * frequencies)[:, :, None, :]
    first, second = turned.chunk(2, dim=-1)
    factor = 1.0 if config.of_scores else concentration(config)
    cosine, sine = angles.cos() * factor, angles.sin() * factor
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)


def concentration(config: RotaryConfig) -> float:
    """YaRN's factor of queries and of keys, its square of scores: Peng et al. 2023 (arXiv 2309.00071), equation 22."""
    return 0.1 * math.log(config.factor) + 1.0 if config.scaling == "yarn" else 1.0


def _frequencies(config: RotaryConfig, size: int, like: Tensor) -> Tensor:
    """RoFormer, equation 15: of each pair the angle of one position."""
    half = size // 2
    return config.base ** (-torch.arange(half, dtype=like.dtype, device=like.device) / half)


def _scaled(config: RotaryConfig, frequencies: Tensor) -> Tensor:
    if config.scaling == "llama3":
        return _llama3(config, frequencies)
    if config.scaling == "yarn":
        return _yarn(config, frequencies)
    return frequencies


def _llama3(config: RotaryConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: Meta's published model.py, `apply_scaling`; Hugging Face's `rope_type` llama3.

    Pairs with a wave longer than the original length are slower by the factor, those with one shorter than a quarter
    of it stay as they are, and between these bounds it is a mean of both by how often the wave fits.
    """
    fits = _LLAMA3_LENGTH * frequencies / (2 * math.pi)
    kept = ((fits - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / config.factor)


def _yarn(config: RotaryConfig, frequencies: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071), definition 1 ("NTK-by-parts"), with the ramp of its published code.

    That is linear over the pairs, from the one that turns 32 times over the original length to the one that turns
    once; Hugging Face's `rope_type` yarn with `truncate` false, as in GPT-OSS, and true, as in DeepSeek-V3's published
    model.py (`find_correction_range`).
    """
    half, length = len(frequencies), float(config.original_length)

    def pair_of(turns: float) -> float:
        return half * math.log(length / (turns * 2 * math.pi)) / math.log(config.base)

    first, last = pair_of(_YARN_FAST), pair_of(_YARN_SLOW)
    if config.of_scores:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, 2 * half - 1.0)
    pairs = torch.arange(half, dtype=frequencies.dtype, device=frequencies.device)
    stretched = ((pairs - first) / (last - first)).clamp(0, 1)
    return frequencies * (1 - stretched + stretched / config.factor)
