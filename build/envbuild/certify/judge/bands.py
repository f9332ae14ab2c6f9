"""How far a case may be from its baseline: as far as rounding takes the baseline itself, times one factor.

The runner trains each baseline again with every weight moved by one unit in the last place of the type it is computed
in. What that does to a number is what rounding may do to it, for this model, step, precision and device: the idea of
TTrace (arXiv 2506.09280). A matrix only limits how wide a band may become.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from envbuild.catalog.matrix import Band
from envbuild.certify.judge.numbers import relative_difference
from envbuild.certify.models import Numbers, Problem, Spread
from envbuild_smoke.results import CaseLine, Gradient

# Of two gradients of a tensor, the expected one first: how far they are apart.
Measure = Callable[[Gradient, Gradient], float]
# One for all models, precisions and devices. The bands of gradients are its own, for no matrix limits them: healthy
# cases on two H200s had at most 0.46 of theirs (benchmarks/records). Bands set by hand fit one model: in bf16 healthy
# grad norms of one were off by up to 1.5e-3, of another by 6.8e-3 (4 H200, Transformer Engine 2.11).
FACTOR = 3.0
# Losses, norms and gradients are summed in float32 whatever the precision: sixteen of its units.
FLOOR = 16 * 2.0**-23


def spread_of(baseline: CaseLine, runs_asked: int) -> Spread | None:
    """What moved weights did to a baseline in so many runs; None where it was not measured."""
    runs = baseline.perturbed or ()
    if not runs or len(runs) != runs_asked or any(len(run.steps) != len(baseline.steps) for run in runs):
        return None
    return Spread(
        runs=len(runs),
        loss=_by_step([run.steps for run in runs], baseline.steps, "loss"),
        grad_norm=_by_step([run.steps for run in runs], baseline.steps, "grad_norm"),
        weights=_largest(run.weights for run in runs),
    )


def _by_step(runs: Sequence[Sequence[object]], steps: Sequence[object], name: str) -> tuple[float, ...]:
    """The largest relative difference up to each step: one step may move little by chance."""
    each = (
        max(relative_difference(getattr(step, name), getattr(run[index], name)) for run in runs)
        for index, step in enumerate(steps)
    )
    return tuple(itertools.accumulate(each, max))


def _largest(values: Iterable[float | None]) -> float | None:
    largest = max(math.inf if value is None else value for value in values)
    return largest if math.isfinite(largest) else None


@dataclass(frozen=True)
class Bands:
    """The bands of the cases of a baseline.

    Attributes:
        limit: how wide they may be at most.
    """

    spread: Spread
    limit: Band

    def of_step(self, name: str, index: int) -> float:
        """That of the loss or the grad_norm of the step with this index."""
        spread: tuple[float, ...] = getattr(self.spread, name)
        return self._band(spread[index], getattr(self.limit, f"{name}_relative"))

    @property
    def weights(self) -> float:
        """That of each tensor of the final weights."""
        spread = self.spread.weights
        return self._band(math.inf if spread is None else spread, self.limit.weights_relative)

    def widest(self) -> Numbers:
        """Those of the last step, and of the weights."""
        return Numbers(loss=self.of_step("loss", -1), grad_norm=self.of_step("grad_norm", -1), weights=self.weights)

    def limited(self, name: str, index: int = -1) -> str:
        """What to say of a band that is the matrix's limit, where moved weights ask for a wider one; else nothing."""
        spread = getattr(self.spread, name)
        spread = spread[index] if isinstance(spread, tuple) else spread
        asked = math.inf if spread is None else FACTOR * spread
        if asked <= getattr(self.limit, f"{name}_relative"):
            return ""
        return f" (the matrix's limit; {FACTOR:g} times the measured spread is {asked:.2g})"

    def _band(self, spread: float, limit: float) -> float:
        return min(max(FACTOR * spread, FLOOR), limit)


@dataclass(frozen=True)
class GradientDifference:
    """How far the gradient of a tensor is from the baseline's, relative to its norm; ``what`` of it."""

    name: str
    what: str
    measured: float
    allowed: float

    @property
    def of_band(self) -> float:
        if math.isinf(self.allowed):
            return 0.0
        return self.measured / self.allowed if math.isfinite(self.measured) else math.inf


@dataclass(frozen=True)
class GradientBands:
    """The bands of the gradients of the first step, by tensor: of their norms, and of where they point.

    Infinite where rounding decides whether there is a gradient, as of an expert that gets no token until weights move.
    """

    norms: Mapping[str, float]
    directions: Mapping[str, float]

    @classmethod
    def measured(cls, baseline: CaseLine) -> GradientBands:
        """Those of the cases of a baseline; empty where they were not measured."""
        if not (baseline.gradients and baseline.perturbed):
            return cls({}, {})
        return cls(*(_gradient_bands(baseline, measure) for measure in (_norm_difference, _distance)))

    @classmethod
    def of_sums(cls, baseline: CaseLine) -> GradientBands:
        """Those of cases that add up the baseline's own gradients in another order."""
        floors = {gradient.name: FLOOR for gradient in baseline.gradients or ()}
        return cls(floors, floors)

    @property
    def caught(self) -> float | None:
        """The error that is caught in the norm of the gradient of half of the tensors: the median of the bands."""
        usual = statistics.median(self.norms.values()) if self.norms else math.inf
        return usual if math.isfinite(usual) else None


def compare_gradients(
    result: CaseLine, baseline: CaseLine, bands: GradientBands
) -> tuple[GradientDifference | None, list[Problem]]:
    """The tensor whose gradient of the first step is farthest out in its band, and the problem if it is outside."""
    own = {gradient.name: gradient for gradient in result.gradients or ()}
    expected = {gradient.name: gradient for gradient in baseline.gradients or ()}
    counts = Counter(gradient.name for gradient in result.gradients or ())
    names = sorted(name for name in counts.keys() | expected.keys() if counts[name] != (name in expected))
    if not own or names:
        shown = ", ".join(names[:5]) or "none"
        text = f"its gradients of the first step are not those of its baseline's tensors: {shown}"
        return None, [Problem(check="parity-gradients", text=text)]
    kinds = (("norm", _norm_difference, bands.norms), ("direction", _distance, bands.directions))
    differences = [
        GradientDifference(name, what, measure(expected[name], own[name]), allowed[name])
        for name in expected
        for what, measure, allowed in kinds
    ]
    # Not >, which is false for a NaN.
    off = [each for each in differences if not each.measured <= each.allowed]
    worst = max(differences, key=lambda each: each.of_band)
    if not off:
        return worst, []
    text = (
        f"the gradient of {worst.name} in the first step has another {worst.what}: off by {worst.measured:.2e} "
        f"relative, {worst.of_band:.2g} times the {worst.allowed:.2e} that is allowed"
    )
    if more := len({each.name for each in off} - {worst.name}):
        text += f"; it is the worst of {more + 1} that are off, of {len(expected)}"
    return worst, [Problem(check="parity-gradients", text=text)]


def _gradient_bands(baseline: CaseLine, measure: Measure) -> Mapping[str, float]:
    """By tensor: from its own spread, and at least from that of half of the tensors.

    Of four moves all may leave a norm where it was by chance. Some gradients are zero but for rounding, and theirs is
    as large as they are: each tensor has a band of its own.
    """
    moved = [{gradient.name: gradient for gradient in run.gradients} for run in baseline.perturbed or ()]
    spreads = {
        gradient.name: max(
            (measure(gradient, run[gradient.name]) for run in moved if gradient.name in run), default=0.0
        )
        for gradient in baseline.gradients or ()
    }
    usual = statistics.median([spread for spread in spreads.values() if math.isfinite(spread)] or [math.inf])
    return {name: max(FACTOR * max(spread, usual), FLOOR) for name, spread in spreads.items()}


def _norm_difference(expected: Gradient, actual: Gradient) -> float:
    return relative_difference(expected.norm, actual.norm)


def _distance(expected: Gradient, actual: Gradient) -> float:
    """About the norm of the difference, relative to the norm: see smoke's drivers/mcore/gradients.py."""
    # Projections on random signs are about as far apart as what is projected (Achlioptas, 2003).
    distance = math.dist(expected.projections, actual.projections) / math.sqrt(len(expected.projections))
    return 0.0 if distance == 0 else distance / expected.norm if expected.norm else math.inf
