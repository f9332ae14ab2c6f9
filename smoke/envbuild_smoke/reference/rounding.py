"""The reference with its values rounded where a library rounds that computes in a type of fewer bits.

Weights, what each operation gives, and the gradients of both are kept in that type; sums inside of an operation are in
float32 (Micikevicius et al. 2017, "Mixed Precision Training", arXiv 1710.03740, section 3.3), which is exact here.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

F = TypeVar("F", bound=Callable[..., Any])


class Rounding(TorchFunctionMode):  # type: ignore[misc]
    """While it is entered, whatever torch computes is rounded to a type, and so is its gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.inside = False

    def __enter__(self) -> Any:
        """Round from now on."""
        _entered.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        """Round no longer."""
        super().__exit__(*error)
        _entered.remove(self)

    def __torch_function__(self, function: Any, types: Iterable[type], arguments: Any = (), options: Any = None) -> Any:
        """Call a function of torch's, and round what it returns."""
        del types
        value = function(*arguments, **(options or {}))
        return value if self.inside else self.rounded(value)

    def rounded(self, value: Any) -> Any:
        """Return it rounded, where it is a tensor that follows from weights, or a tuple with some.

        Others, as the angles of positions, a library has in float32.
        """
        if type(value) is tuple:
            return tuple(map(self.rounded, value))
        return _Round.apply(value, self.dtype) if isinstance(value, Tensor) and value.requires_grad else value

    def product(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return what a linear layer gives, values x weight, transposed."""
        return values @ weight.T


_entered: list[Rounding] = []


def product(values: Tensor, weight: Tensor) -> Tensor:
    """Return what a linear layer without a bias gives; `weight` has shape [outputs, inputs]."""
    return _entered[-1].product(values, weight) if _entered else values @ weight.T


def one_operation(formula: F) -> F:
    """Mark a formula that libraries compute in one go, in float32: what it gives is rounded."""
    return _in_float32(formula, lambda rounding, value: rounding.rounded(value))


def kept_in_float32(formula: F) -> F:
    """Mark a formula that libraries compute in float32, and whose result they keep in it."""
    return _in_float32(formula, lambda _, value: value)


def _in_float32(formula: F, finish: "Callable[[Rounding, Any], Any]") -> F:
    @wraps(formula)
    def computed(*arguments: Any, **options: Any) -> Any:
        rounding = _entered[-1] if _entered else None
        if rounding is None or rounding.inside:
            return formula(*arguments, **options)
        rounding.inside = True
        try:
            value = formula(*arguments, **options)
        finally:
            rounding.inside = False
        return finish(rounding, value)

    return cast("F", computed)


class _Round(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return values.to(dtype).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype).to(gradient.dtype), None
