"""Holds a baseline against the reference: the smoke runner's float64 model, which shares no code with the library.

A bug that is there on one device too shows here alone. The bands are for the arithmetic of a case, and for all models:
the reference computes in float64 from the baseline's own initial weights, so they have room for the rounding of the
baseline and for nothing else.

Observed, the largest over the models of the shipped matrices, on the CPU (torch 2.13) and on 2x H200 (torch 2.11,
Transformer Engine 2.11), megatron-core 0.16.1 (loss, grad norm: of any step):

=================  =======  =========  ===========  =========  =======
arithmetic         loss     grad norm  activations  gradients  weights
=================  =======  =========  ===========  =========  =======
fp32               7.2e-8   7.0e-6     3.7e-7       6.7e-7     3.8e-6
TF32               3.3e-6   1.2e-4     8.7e-4       1.4e-3     8.6e-4
bf16               4.5e-5   2.6e-2     9.1e-3       2.6e-2     2.5e-2
bf16 with experts  5.4e-5   2.1e-3     1.2e-1       1.2e-1     8.1e-2
fp8                3.2e-4   1.2e-2     1.1e-1       1.7e-1     9.5e-2
=================  =======  =========  ===========  =========  =======

In bf16 and fp8 each tensor has a band of its own, and no other limit: the reference trains again with its values
rounded, and with its weights moved by one unit in the last place of bf16, and so much rounding may do. Of final weights
it is how far Adam goes where gradients are so far off: rounding decides the sign of a few elements, and with one of
them a bias of 64 was off by 7.8e-2 on a CPU without AVX-512, healthy. What the library keeps in float32 is compared by
itself (`Float32Part`): in all that follows from it, the rounding of the rest hides it.

In fp32 a band is at least five times what was observed: other processors sum in other orders. Where scores of a router
are closer than bf16 can tell, a token goes to another expert than in float64, which changes all that the two experts
have of it. With Transformer Engine, and in the kernels of Mamba, fp32 matrices are multiplied in TF32; megatron-core
0.15 and 0.16 take its product for every router, where it is before 2.11.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from envbuild.certify.judge.bands import FACTOR, FLOOR
from envbuild.certify.judge.numbers import off_by, relative_difference
from envbuild.certify.models import Problem, ReferenceNumbers, ReferenceVerdict
from envbuild_smoke.plan.axes import Precision
from envbuild_smoke.plan.models import Case, Model
from envbuild_smoke.results import FLOAT32_BITS, CaseLine, Float32Part, ReferenceComparison, TensorDifference

_FP32 = ReferenceNumbers(loss=1e-6, grad_norm=1e-4, activations=1e-5, gradients=1e-5, weights=2e-5)
_TF32 = ReferenceNumbers(loss=2e-5, grad_norm=1e-3, activations=4e-3, gradients=6e-3, weights=4e-3)
# Where the runner measured nothing.
_BF16 = ReferenceNumbers(loss=2e-4, grad_norm=6e-2, activations=2e-2, gradients=6e-2, weights=6e-2)
# A tensor that is stored in bf16 is off by so much.
_UNIT = 2.0**-8
# Of what is computed in float32 and then rounded: a sixteenth of a unit, for few elements are rounded otherwise.
_FEW = 1 / 16
_FP8 = ReferenceNumbers(loss=2e-3, grad_norm=1e-1, activations=2.5e-1, gradients=4e-1, weights=2e-1)
# With routers, in less than fp32.
_EXPERTS = {"activations": 3e-1, "gradients": 3e-1, "weights": 2e-1}
# What every model keeps in float32; the softmax of attention is often inside of a kernel.
_ALWAYS = {"accumulation", "loss", "main weights"}
_ENGINE = "transformer-engine"
_KINDS = {
    "activations": "activation of the first micro batch",
    "gradients": "gradient of the first step",
    "weights": "final weight",
}


def band_of(precision: Precision, model: Model, router_gemm: str = "none") -> ReferenceNumbers:
    """How far a baseline of a model may be from the reference; ``router_gemm`` is whose product routes tokens."""
    in_torch = model.layer_spec == "local" and model.mamba is None and router_gemm != _ENGINE
    if precision == "fp32" and in_torch:
        return _FP32
    band = {"fp32": _TF32, "bf16": _BF16, "fp16": _BF16, "fp8": _FP8}[precision]
    if model.moe is None:
        return band
    return band.model_copy(update={name: max(getattr(band, name), value) for name, value in _EXPERTS.items()})


def _not_compared(case: Case, model: Model, reason: str) -> list[Problem]:
    """A baseline that should have been compared fails: a renamed weight must not switch the reference off."""
    training, moe = case.training, model.moe
    has_router_losses = moe is not None and (moe.aux_loss_coeff or moe.z_loss_coeff)
    # megatron-core has two weights for these losses, and its documentation states a third: no formula is the right one.
    if training.calculate_per_token_loss and training.loss_mask != "none" and has_router_losses:
        return []
    return [Problem(check="reference", text=f"{reason}: the reference could not compare this baseline")]


def compare_reference(case: Case, model: Model, result: CaseLine) -> tuple[ReferenceVerdict | None, list[Problem]]:
    """The verdict on a baseline that trained to its end, and where it is not the reference's training.

    Args:
        case: of the plan, with the ``model`` that it names.
    """
    comparison = result.reference
    if not case.compare_reference:
        return None, []
    if comparison is None:
        text = "it was to be compared with the reference, and the runner reported no comparison"
        return None, [Problem(check="reference", text=text)]
    if comparison.samples is not None:
        text = f"{comparison.samples}, so nothing was compared with the reference"
        return ReferenceVerdict(not_compared=comparison.samples), [Problem(check="samples", text=text)]
    if comparison.reason is not None:
        return ReferenceVerdict(not_compared=comparison.reason), _not_compared(case, model, comparison.reason)
    if case.precision != "fp32" and case.perturbed_runs and not _is_measured(case, comparison):
        text = "what rounding does to the reference was to be measured, and the runner did not report that whole"
        return None, [Problem(check="reference", text=text)]
    router_gemm = "none" if result.observed is None else result.observed.router_gemm
    band = _measured_steps(comparison, band_of(case.precision, model, router_gemm))
    differences = {name: getattr(comparison, name) for name in _KINDS}
    allowed = {name: _allowed(name, tensors, band) for name, tensors in differences.items()}
    largest = {name: _largest(tensors) for name, tensors in differences.items()}
    first, later = _steps(result, comparison, band)
    problems = [
        *_tensors("activations", comparison.activations, allowed["activations"]),
        *first,
        *_tensors("gradients", comparison.gradients, allowed["gradients"]),
        *later,
        *_tensors("weights", comparison.weights, allowed["weights"]),
        *_float32(comparison.float32_parts or ()),
    ]
    if len(comparison.steps) != len(result.steps) or not (comparison.gradients and comparison.weights):
        problems.append(Problem(check="reference", text="the comparison with the reference is incomplete"))
    for name in ("loss", "grad_norm"):
        pairs = zip(result.steps, comparison.steps, strict=False)
        largest[name] = max(
            (relative_difference(getattr(r, name), getattr(b, name)) for b, r in pairs), default=math.inf
        )
    numbers = {name: value for name, value in largest.items() if value is not None and math.isfinite(value)}
    verdict = ReferenceVerdict(
        tensors=sum(map(len, differences.values())),
        largest_relative_difference=ReferenceNumbers(**numbers),
        tolerance=band.model_copy(update={name: max(bands) for name, bands in allowed.items() if bands}),
    )
    return verdict, problems


def _largest(tensors: Iterable[TensorDifference]) -> float | None:
    return max((_value(tensor) for tensor in tensors), default=None)


def _value(tensor: TensorDifference) -> float:
    return math.inf if tensor.relative_difference is None else tensor.relative_difference


def _is_measured(case: Case, comparison: ReferenceComparison) -> bool:
    """Whether each tensor has what rounding does to it, each training again all of its steps, and float32 its parts."""
    tensors = (*comparison.activations, *comparison.gradients, *comparison.weights)
    whole = comparison.perturbed and all(len(run) == len(comparison.steps) for run in comparison.perturbed)
    parts = {part.part for part in comparison.float32_parts or ()}
    # A recipe may sum gradients in bf16.
    expected = _ALWAYS if case.settings.grad_reduce_in_fp32 else _ALWAYS - {"accumulation"}
    return bool(whole) and all(tensor.spread is not None for tensor in tensors) and parts >= expected


def _measured_steps(comparison: ReferenceComparison, band: ReferenceNumbers) -> ReferenceNumbers:
    """The bands of loss and gradient norm: what rounding does to any of their steps, where that was measured."""
    spreads = {
        name: max(
            relative_difference(getattr(step, name), getattr(moved, name))
            for run in comparison.perturbed
            for step, moved in zip(comparison.steps, run, strict=True)
        )
        for name in ("loss", "grad_norm")
        if comparison.perturbed and comparison.steps
    }
    return band.model_copy(update={name: max(FACTOR * spread, FLOOR) for name, spread in spreads.items()})


def _allowed(kind: str, tensors: Sequence[TensorDifference], band: ReferenceNumbers) -> list[float]:
    """How far each tensor of a kind may be off: what the runner measured for it, or the same for all."""
    spreads = [tensor.spread for tensor in tensors if tensor.spread is not None]
    if len(spreads) < len(tensors) or not spreads:
        return [getattr(band, kind)] * len(tensors)
    if kind == "weights":
        return [spread + _UNIT for spread in spreads]
    # As in the bands of layouts: few trainings may leave one tensor where it was.
    usual = statistics.median(spreads)
    return [max(FACTOR * max(spread, usual), _UNIT) for spread in spreads]


def _tensors(kind: str, tensors: Sequence[TensorDifference], allowed: Sequence[float]) -> list[Problem]:
    """The first tensor of a kind that is off: in the order of computation the others follow from it."""
    off = [(tensor, band) for tensor, band in zip(tensors, allowed, strict=True) if not _value(tensor) <= band]
    if not off:
        return []
    first, band = off[0]
    text = (
        f"{first.name} ({_KINDS[kind]}) differs from the reference by {_value(first):.2e} relative, allowed "
        f"{band:.2g}; it is the first of {len(off)} that do, of {len(tensors)}"
    )
    return [Problem(check="reference", text=text)]


def _float32(parts: Sequence[Float32Part]) -> list[Problem]:
    """What is not computed in float32 where a library does so whatever the type of the rest; the first of each kind."""
    problems: dict[str, Problem] = {}
    for part in parts:
        floor = FLOOR if part.bits == FLOAT32_BITS else _FEW * 2.0**-part.bits
        allowed, measured = max(FACTOR * (part.spread or 0.0), floor), part.relative_difference
        if measured is None or not measured <= allowed:
            off = math.inf if measured is None else measured
            text = f"{part.part} in float32: {part.name} is off by {off:.2e} relative, allowed {allowed:.2g}"
            problems.setdefault(part.part, Problem(check="reference", text=text))
    return list(problems.values())


def _steps(
    result: CaseLine, comparison: ReferenceComparison, band: ReferenceNumbers
) -> tuple[list[Problem], list[Problem]]:
    """What is off in the loss of the first step, which comes before all gradients, and what is first after that."""
    first: list[Problem] = []
    later: list[Problem] = []
    for mine, reference in zip(result.steps, comparison.steps, strict=False):
        for name in ("loss", "grad_norm"):
            expected, value, allowed = getattr(reference, name), getattr(mine, name), getattr(band, name)
            if relative_difference(expected, value) <= allowed:
                continue
            numbers = off_by(math.nan if expected is None else expected, value, allowed)
            problem = Problem(check="reference", text=f"step {mine.step}: {name} of the reference: {numbers}")
            (first if mine.step == 1 and name == "loss" else later).append(problem)
    return first, later[:1]
