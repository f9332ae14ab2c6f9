"""How far a training is from the reference, tensor by tensor."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from envbuild_smoke.reference.spread import Spread, difference
from envbuild_smoke.reference.training import Trained


def compare(trained: Trained, reference: Trained, spread: "Spread | None" = None) -> dict[str, Any]:
    """Return the reference's steps and, for each kind of tensor, the differences in order of computation.

    The difference is ||own - reference|| / ||reference||, or ||own|| where that is zero; None where it is not finite or
    the shapes differ. Activations that the training has under no name are left out: fused layers do not show them.
    """
    kinds = ("activations", "gradients", "weights")
    tensors = {
        kind: _differences(getattr(trained, kind), getattr(reference, kind), getattr(spread, kind, {}))
        for kind in kinds
    }
    perturbed = None if spread is None else [_steps(steps) for steps in spread.steps]
    return {"steps": _steps(reference.steps), "perturbed": perturbed, **tensors}


def _steps(steps: "list[tuple[float, float]]") -> list[dict[str, float]]:
    return [{"loss": loss, "grad_norm": norm} for loss, norm in steps]


def _differences(
    own: Mapping[str, Tensor], reference: Mapping[str, Tensor], spread: Mapping[str, float]
) -> list[dict[str, Any]]:
    return [
        {"name": name, "relative_difference": difference(own[name], value), "spread": spread.get(name)}
        for name, value in reference.items()
        if name in own
    ]
