"""How far a training is from the reference, tensor by tensor."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from envbuild_smoke.reference.spread import Spread, difference
from envbuild_smoke.reference.training import Trained
from envbuild_smoke.results import ReferenceComparison, ReferenceStep, TensorDifference


def compare(trained: Trained, reference: Trained, spread: "Spread | None" = None) -> ReferenceComparison:
    """Return the reference's steps and, for each kind of tensor, the differences in order of computation.

    The difference is ||own - reference|| / ||reference||, or ||own|| where that is zero; None where it is not finite or
    the shapes differ. Activations that the training has under no name are left out: fused layers do not show them.
    """

    def tensors(kind: str) -> tuple[TensorDifference, ...]:
        return _differences(getattr(trained, kind), getattr(reference, kind), getattr(spread, kind, {}))

    return ReferenceComparison(
        steps=_steps(reference.steps),
        perturbed=None if spread is None else tuple(_steps(steps) for steps in spread.steps),
        activations=tensors("activations"),
        gradients=tensors("gradients"),
        weights=tensors("weights"),
    )


def _steps(steps: "Iterable[tuple[float, float]]") -> tuple[ReferenceStep, ...]:
    return tuple(ReferenceStep(loss=loss, grad_norm=norm) for loss, norm in steps)


def _differences(
    own: Mapping[str, Tensor], reference: Mapping[str, Tensor], spread: Mapping[str, float]
) -> tuple[TensorDifference, ...]:
    return tuple(
        TensorDifference(name=name, relative_difference=difference(own[name], value), spread=spread.get(name))
        for name, value in reference.items()
        if name in own
    )
