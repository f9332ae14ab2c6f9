"""How far a training is from the reference, tensor by tensor."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from envbuild_smoke.reference.training import Trained


def compare(trained: Trained, reference: Trained) -> dict[str, Any]:
    """Return the reference's steps and, for each kind of tensor, the differences in order of computation.

    The difference is ||own - reference|| / ||reference||, or ||own|| where that is zero; None where it is not finite or
    the shapes differ. Activations that the training has under no name are left out: fused layers do not show them.
    """
    kinds = ("activations", "gradients", "weights")
    tensors = {kind: _differences(getattr(trained, kind), getattr(reference, kind)) for kind in kinds}
    return {"steps": [{"loss": loss, "grad_norm": norm} for loss, norm in reference.steps], **tensors}


def _differences(own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    return [
        {"name": name, "relative_difference": _difference(own[name], value)}
        for name, value in reference.items()
        if name in own
    ]


def _difference(own: Tensor, reference: Tensor) -> "float | None":
    if own.shape != reference.shape:
        return None
    distance = float(torch.linalg.vector_norm(own.double() - reference))
    size = float(torch.linalg.vector_norm(reference))
    relative = distance / size if size > 0 else distance
    return relative if math.isfinite(relative) else None
