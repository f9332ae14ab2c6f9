"""Products of linear layers in fp8, as Transformer Engine has them; all else is in bf16.

Values, weights and gradients are scaled so that the largest of a tensor, or of a block, is the format's largest:
Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv 2209.05433), sections 3 and 3.1; blocks: DeepSeek-V3
(arXiv 2412.19437), section 3.3.2 and figure 7, with scales that are powers of two. Delayed scales, which are those of
the micro batch before, differ from a tensor's own by less than the rounding does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from envbuild_smoke.reference.rounding import Rounding

Recipe = Literal["delayed", "tensorwise", "blockwise"]
BLOCK = 128


class Fp8(Rounding):
    """Rounds to bf16, and to fp8 what linear layers multiply."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(torch.bfloat16)
        self._formats = _RECIPES[recipe]

    def product(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return values x weight, transposed."""
        given = self.rounded(values), self.rounded(weight)
        product: Tensor = self.rounded(_Product.apply(*given, self._formats))
        return product


@dataclass(frozen=True)
class _Formats:
    """What is multiplied, rounded along its last axis; `square` also over blocks of rows."""

    forward: torch.dtype
    backward: torch.dtype
    scaled: Callable[[Tensor, torch.dtype], Tensor]
    square: Callable[[Tensor, torch.dtype], Tensor]


def by_tensor(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values as they are in a format of fp8 with one scale."""
    largest = float(values.abs().max())
    if largest == 0:
        return values
    scale = torch.finfo(dtype).max / largest
    return (values * scale).clamp(*_range(dtype)).float().to(dtype).to(values.dtype) / scale


def by_row(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values as they are with a scale for each 128 neighbours of a row."""
    return _by_block(values, dtype, 1)


def by_square(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values, of shape [rows, columns], as they are with a scale for each 128 x 128 of them."""
    return _by_block(values, dtype, BLOCK)


def _by_block(values: Tensor, dtype: torch.dtype, high: int) -> Tensor:
    rows, columns = values.shape
    whole = torch.nn.functional.pad(values, (0, -columns % BLOCK, 0, -rows % high))
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, high))
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scale = torch.where(largest > 0, torch.finfo(dtype).max / largest, 1.0).log2().floor().exp2()
    rounded = (blocks * scale).clamp(*_range(dtype)).float().to(dtype).to(values.dtype) / scale
    return rounded.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def _range(dtype: torch.dtype) -> tuple[float, float]:
    return torch.finfo(dtype).min, torch.finfo(dtype).max


# Megatron's `hybrid` for scales of a tensor; with blocks, gradients have e4m3 too (drivers/mcore/model.py).
_BY_TENSOR = _Formats(torch.float8_e4m3fn, torch.float8_e5m2, by_tensor, by_tensor)
_RECIPES: "dict[Recipe, _Formats]" = {
    "delayed": _BY_TENSOR,
    "tensorwise": _BY_TENSOR,
    "blockwise": _Formats(torch.float8_e4m3fn, torch.float8_e4m3fn, by_row, by_square),
}


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, formats: _Formats) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.formats = formats
        rows = formats.scaled(values.flatten(0, -2), formats.forward)
        return (rows @ formats.square(weight, formats.forward).T).unflatten(0, values.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        values, weight = ctx.saved_tensors
        formats: _Formats = ctx.formats
        rows = gradient.flatten(0, -2)
        of_values = formats.scaled(rows, formats.backward) @ formats.square(weight, formats.forward)
        # For the weight's gradient blocks are along the tokens.
        tokens = formats.scaled(values.flatten(0, -2).T.contiguous(), formats.forward)
        of_weight = formats.scaled(rows.T.contiguous(), formats.backward) @ tokens.T
        return of_values.unflatten(0, values.shape[:-1]), of_weight, None
