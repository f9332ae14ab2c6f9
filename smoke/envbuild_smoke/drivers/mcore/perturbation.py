"""Moves the weights of a model as rounding would: each by one unit in the last place of the type it is computed in.

What such a move does to a training is what rounding may do to it, for this model, precision and device: the idea of
TTrace (arXiv 2506.09280), which takes its tolerances from it.
"""

import math
from collections.abc import Iterable, Mapping

import torch

from envbuild_smoke.plan.models import Case, Model
from envbuild_smoke.reference.spread import unit_in_the_last_place
from envbuild_smoke.results import Gradient, Perturbed, PerturbedStep, Step

# Stored bits of the mantissa: IEEE 754 binary32, TF32, binary16, bfloat16, fp8 e4m3.
_FP32, _TF32, _FP16, _BF16, _FP8 = 23, 10, 10, 7, 3


def mantissa_bits(case: Case, model: Model) -> int:
    """Return the bits of the mantissa with which matrices are multiplied."""
    if case.precision == "fp32":
        # Transformer Engine multiplies fp32 matrices in TF32, and so do Mamba's kernels, which are Triton's.
        return _FP32 if model.layer_spec == "local" and model.mamba is None else _TF32
    return {"bf16": _BF16, "fp16": _FP16}.get(case.precision, _FP8)


def move_weights(module: torch.nn.Module, bits: int, seed: int) -> None:
    """Add or subtract, at random by `seed`, one unit in the last of `bits` places; zeros stay."""
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=generator, device=device).bool()
            unit = unit_in_the_last_place(parameter.float(), bits)
            parameter.add_(torch.where(up, unit, -unit).to(parameter.dtype))


def largest_difference(weights: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> float:
    """Return the largest over all tensors of ||other - own|| / ||own||, in float64, as `compare_weights` has it."""
    largest = 0.0
    for name, own in weights.items():
        size = float(torch.linalg.vector_norm(own.double()))
        distance = float(torch.linalg.vector_norm(others[name].double() - own.double()))
        largest = max(largest, distance / size if size > 0 else distance)
    return largest


def perturbed(steps: Iterable[Step], gradients: tuple[Gradient, ...], weights: float) -> Perturbed:
    """Return what a training with moved weights measured; `weights` is its largest difference of a final weight."""
    names = ("step", "loss", "grad_norm")
    numbers = (PerturbedStep(**{name: getattr(step, name) for name in names}) for step in steps)
    return Perturbed(steps=tuple(numbers), gradients=gradients, weights=weights if math.isfinite(weights) else None)
