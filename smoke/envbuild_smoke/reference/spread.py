"""What rounding may do to the reference: it trains again, in float64, rounded, and from weights that are moved.

Nothing of it is the library's, so that no bug there can make wide what has to find it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from envbuild_smoke.reference.config import ModelConfig, OptimizerConfig
from envbuild_smoke.reference.model import MicroBatch
from envbuild_smoke.reference.rounding import Rounding
from envbuild_smoke.reference.training import Adam, Trained, train

# How many of its standard deviations a gradient is moved by, where Adam is asked what comes of it. Moved weights do
# about twice to a gradient what rounding in bf16 does.
DEVIATIONS = 2.0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """By tensor the relative difference that rounding may make, and steps of each of the trainings."""

    steps: list[list[tuple[float, float]]]
    activations: Mapping[str, float]
    gradients: Mapping[str, float]
    weights: Mapping[str, float]


def difference(own: Tensor, reference: Tensor) -> "float | None":
    """Return ||own - reference|| / ||reference||, or ||own|| where that is zero; None where it is not to be had."""
    if own.shape != reference.shape:
        return None
    distance = float(torch.linalg.vector_norm(own.double() - reference))
    size = float(torch.linalg.vector_norm(reference))
    relative = distance / size if size > 0 else distance
    return relative if math.isfinite(relative) else None


def unit_in_the_last_place(values: Tensor, bits: int) -> Tensor:
    """Return the unit in the last of `bits` places of the mantissa; zero for zeros."""
    # frexp's mantissa is in [0.5, 1).
    exponent = torch.frexp(values)[1] - 1
    unit = torch.ldexp(torch.ones_like(values), exponent - bits)
    unit[values == 0] = 0
    return unit


def measure(
    config: ModelConfig,
    optimizer: OptimizerConfig,
    weights: Mapping[str, Tensor],
    steps: Iterable[Sequence[MicroBatch]],
    runs: int,
    dtype: torch.dtype,
) -> tuple[Trained, Spread]:
    """Train the reference, then again with all values rounded to `dtype`, and with each weight moved by its last place.

    It is trained so `runs` times: where rounding decides between experts, one training may show nothing of it.
    """
    batches, bits = list(steps), round(-math.log2(torch.finfo(dtype).eps))
    gradients: list[Mapping[str, Tensor]] = []
    reference = train(config, optimizer, weights, batches, lambda _, own: gradients.append(own))
    squares = [{name: torch.zeros_like(value) for name, value in step.items()} for step in gradients]

    def add(step: int, own: Mapping[str, Tensor]) -> None:
        for name, value in own.items():
            squares[step][name] += (value - gradients[step][name]).square() / runs

    moved = [train(config, optimizer, _moved(weights, bits, seed), batches, add) for seed in range(runs)]
    rounded = train(config, optimizer, weights, batches, rounding=Rounding(dtype))
    largest = {
        kind: {
            name: max(difference(getattr(run, kind)[name], value) or 0.0 for run in (*moved, rounded))
            for name, value in getattr(reference, kind).items()
        }
        for kind in ("activations", "gradients")
    }
    final = _weights_spread(optimizer, weights, reference, gradients, squares)
    for name, value in reference.weights.items():
        final[name] = max(final[name], difference(rounded.weights[name], value) or 0.0)
    return reference, Spread(steps=[run.steps for run in (*moved, rounded)], weights=final, **largest)


def _moved(weights: Mapping[str, Tensor], bits: int, seed: int) -> dict[str, Tensor]:
    moved: dict[str, Tensor] = {}
    for name, weight in weights.items():
        values = weight.detach().double()
        # One generator for all would draw the same signs for each tensor of a shape.
        generator = torch.Generator(values.device).manual_seed(seed * len(weights) + len(moved))
        up = torch.randint(0, 2, values.shape, generator=generator, device=values.device).bool()
        unit = unit_in_the_last_place(values, bits)
        moved[name] = values + torch.where(up, unit, -unit)
    return moved


def _weights_spread(
    optimizer: OptimizerConfig,
    weights: Mapping[str, Tensor],
    reference: Trained,
    gradients: Sequence[Mapping[str, Tensor]],
    squares: Sequence[Mapping[str, Tensor]],
) -> dict[str, float]:
    """By tensor how far Adam goes from the reference's final weights where rounding moves gradients up, or all down.

    Adam's first step is as long for a small gradient as for a large one: where rounding decides the sign of an element,
    it decides its step. Few trainings show few of those elements; their gradients show all.
    """
    ends = []
    for sign in (DEVIATIONS, -DEVIATIONS):
        own = {name: weight.detach().double().clone() for name, weight in weights.items()}
        adam = Adam(optimizer, own)
        for step, (_, norm) in enumerate(reference.steps):
            adam.step({n: g + sign * squares[step][n].sqrt() for n, g in gradients[step].items()}, norm)
        ends.append(own)
    spread = {}
    for name, value in reference.weights.items():
        distance = torch.maximum(*((end[name] - value).abs() for end in ends))
        spread[name] = difference(value + distance, value) or 0.0
    return spread
