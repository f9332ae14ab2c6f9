"""How weights are drawn: each tensor from a normal distribution around 0, or all of one value."""

import math
from collections.abc import Iterable

from torch import Tensor

# How many standard errors mean and deviation of what was drawn may be off. Of a billion healthy tensors, that is two.
ERRORS = 6.0


def initial_problem(weights: Iterable[tuple[str, Tensor]], deviation: float, layers: int) -> "str | None":
    """Return how the first tensor that is not as it is to be drawn differs; None where all are.

    Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3: weights from N(0, deviation), those before a
    residual connection scaled by 1 / sqrt(2 x layers). Norms begin as ones, biases as zeros.
    """
    for name, weight in weights:
        values = weight.detach().double()
        constant = _constant(name)
        if constant is not None:
            if not bool((values == constant).all()):
                return f"{name} is not {constant:g} everywhere"
            continue
        expected = deviation / math.sqrt(2 * layers) if _ends_branch(name) else deviation
        mean, spread = float(values.mean()), float(values.square().mean().sqrt())
        limit = ERRORS / math.sqrt(values.numel())
        if abs(mean) > limit * expected:
            return (
                f"{name} has mean {mean:.3g}, and 0 is expected (deviation {expected:.3g}, {values.numel()} elements)"
            )
        # The standard error of a standard deviation is smaller than that of a mean by sqrt(2).
        if abs(spread / expected - 1) > limit / math.sqrt(2):
            return f"{name} has deviation {spread:.3g} of {values.numel()} elements, not {expected:.3g}"
    return None


def _constant(name: str) -> "float | None":
    own = name.split(".")
    if "norm" in own[-2]:
        return 1.0 if own[-1] == "weight" else 0.0
    return 0.0 if own[-1] == "bias" else None


def _ends_branch(name: str) -> bool:
    return name.endswith((".linear_proj.weight", ".linear_fc2.weight"))
