"""The judge holds baselines against the reference, and names the first tensor that is off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.certify.plans import BASELINE, CASES, MATRIX, line, lines_of, plan_of, read, typed

from envbuild.certify.judge import reference
from envbuild.certify.judge.judge import judge
from envbuild.certify.judge.reference import band_of
from envbuild.certify.models import CaseVerdict
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.models import Mamba, Moe
from envbuild_smoke.results import ReferenceComparison

FIRST, SECOND = "decoder.layers.0.input_layernorm", "decoder.layers.0"
GPT = typed(plan_of()).models["gpt"]
EXPERTS = Moe(num_experts=4, router_topk=2)


def tensors(*differences: float | None) -> list[dict[str, Any]]:
    return [
        {"name": name, "relative_difference": value} for name, value in zip((FIRST, SECOND), differences, strict=True)
    ]


@pytest.fixture
def judged(tmp_path):
    """Judges the baseline, whose comparison with the reference is changed."""

    def verdict(changes: dict[str, Any] | None) -> CaseVerdict:
        plan = plan_of()
        lines = lines_of(plan)
        baseline = line(lines, BASELINE)
        baseline["reference"] = None if changes is None else {**baseline["reference"], **changes}
        results = read(tmp_path / "results.jsonl", plan, lines)
        return next(case for case in judge(CASES, MATRIX, results, typed(plan)) if case.id == BASELINE)

    return verdict


def test_baseline_that_agrees_passes_with_its_numbers_and_bands(judged):
    verdict = judged({"activations": tensors(2e-7, 9e-6)})
    assert (verdict.passed, verdict.reference.not_compared, verdict.reference.tensors) == (True, "", 4)
    assert verdict.reference.largest_relative_difference.activations == 9e-6
    assert verdict.reference.largest_relative_difference.loss == 0
    assert verdict.reference.tolerance == band_of("fp32", GPT)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"activations": tensors(2e-2, 1e-1), "weights": tensors(0.5, 0.5)},
            f"{FIRST} (activation of the first micro batch) differs from the reference by 2.00e-02",
        ),
        ({"gradients": tensors(0.25, 0.5)}, f"{FIRST} (gradient of the first step) differs from the reference by"),
        ({"weights": tensors(1e-7, None)}, f"{SECOND} (final weight) differs from the reference by inf relative"),
        ({"weights": []}, "the comparison with the reference is incomplete"),
        ({"steps": []}, "the comparison with the reference is incomplete"),
        (None, "it was to be compared with the reference, and the runner reported no comparison"),
    ],
)
def test_baseline_that_is_off_fails_with_the_first_tensor(judged, changes, text):
    verdict = judged(changes)
    assert not verdict.passed
    assert verdict.problems[0].check == "reference"
    assert verdict.problems[0].text.startswith(text)


def test_text_counts_the_tensors_that_are_off(judged):
    (problem,) = judged({"gradients": tensors(1e-7, 0.25)}).problems
    assert problem.text.startswith(f"{SECOND} (gradient of the first step)")
    assert problem.text.endswith("it is the first of 1 that do, of 2")


def test_problems_are_in_the_order_of_computation(judged):
    steps = [{"loss": 6.0, "grad_norm": None}] * MATRIX.training.steps
    verdict = judged({"gradients": tensors(1.0, 1.0), "steps": steps, "weights": tensors(1.0, 1.0)})
    texts = [problem.text for problem in verdict.problems]
    starts = ("step 1: loss of the reference: expected 6, found 6.375", f"{FIRST} (gradient", "step 1: grad_norm")
    assert [text.startswith(start) for text, start in zip(texts, starts, strict=False)] == [True, True, True]
    assert texts[3].startswith(f"{FIRST} (final weight)")
    # A number that is not finite is not in JSON.
    assert verdict.reference.largest_relative_difference.grad_norm is None


def test_other_samples_are_not_taken_for_a_wrong_model(judged):
    verdict = judged({"samples": "step 1 read the planned samples in another order", "steps": [], "weights": []})
    assert [(problem.check, problem.text) for problem in verdict.problems] == [
        (
            "samples",
            "step 1 read the planned samples in another order, so nothing was compared with the reference",
        )
    ]


def test_what_the_reference_cannot_read_fails(judged):
    """A release that renames a weight must not switch the reference off."""
    reason = "the model has no output_layer.weight"
    verdict = judged({"reason": reason, "steps": [], "gradients": []})
    assert (verdict.passed, verdict.reference.not_compared) == (False, reason)
    assert [(problem.check, problem.text) for problem in verdict.problems] == [
        ("reference", f"{reason}: the reference could not compare this baseline")
    ]
    assert set(verdict.reference.largest_relative_difference.model_dump().values()) == {None}


@pytest.mark.parametrize(
    ("mask", "per_token", "moe", "fails"),
    [
        ("uneven", True, {"aux_loss_coeff": 0.01, "z_loss_coeff": 0.0}, False),
        ("uneven", True, {"aux_loss_coeff": 0.0, "z_loss_coeff": 0.001}, False),
        ("uneven", True, {"aux_loss_coeff": 0.0, "z_loss_coeff": 0.0}, True),
        ("none", True, {"aux_loss_coeff": 0.01, "z_loss_coeff": 0.0}, True),
        ("uneven", False, {"aux_loss_coeff": 0.01, "z_loss_coeff": 0.0}, True),
        ("uneven", True, None, True),
    ],
)
def test_only_losses_that_are_not_defined_are_left_out(mask, per_token, moe, fails):
    case = typed(plan_of()).case(BASELINE)
    case = replace(case, training=replace(case.training, loss_mask=mask, calculate_per_token_loss=per_token))
    model = replace(GPT, moe=moe and replace(EXPERTS, **moe))
    assert bool(reference._not_compared(case, model, "why")) is fails


@pytest.mark.parametrize("name", ["loss", "grad_norm", "activations", "gradients", "weights"])
def test_bands_widen_with_the_rounding_of_the_arithmetic(name):
    local, engine = GPT, replace(GPT, layer_spec="transformer-engine")
    bands = [
        band_of("fp32", local),
        # Transformer Engine multiplies in TF32.
        band_of("fp32", engine),
        band_of("bf16", local),
        band_of("fp8", engine),
    ]
    values = [getattr(band, name) for band in bands]
    assert values == sorted(set(values))
    # Triton's kernels multiply in TF32 too.
    assert (
        band_of("fp32", replace(GPT, mamba=Mamba(hybrid_override_pattern="M", state_dim=8, head_dim=8, num_groups=4)))
        == bands[1]
    )
    experts = replace(GPT, moe=EXPERTS)
    assert band_of("fp32", experts, "torch") == bands[0]
    # megatron-core takes Transformer Engine's product for a router, where there is one, under either spec.
    assert getattr(band_of("fp32", experts, "transformer-engine"), name) >= values[1]
    assert getattr(band_of("bf16", experts), name) >= values[2]


def part(name: str, measured: float | None = 1e-7, spread: float = 1e-7, bits: int = 24) -> dict[str, Any]:
    return {"part": name, "name": FIRST, "relative_difference": measured, "spread": spread, "bits": bits}


def comparison(**changes: Any) -> ReferenceComparison:
    """Of two tensors and one step in bf16, trained twice again."""
    both = [{"name": name, "relative_difference": 1e-3, "spread": 2e-3} for name in (FIRST, SECOND)]
    step = {"loss": 6.0, "grad_norm": 1.0}
    moved = [[{"loss": 6.0006, "grad_norm": 1.001}], [{"loss": 6.0, "grad_norm": 1.002}]]
    whole = {"reason": None, "samples": None, "steps": [step], "perturbed": moved, "seconds": 1.0}
    whole["float32_parts"] = [part(name) for name in ("accumulation", "softmax", "loss", "main weights")]
    return read_object(ReferenceComparison, {**whole, **dict.fromkeys(reference._KINDS, both), **changes}, "reference")


def test_bands_of_bf16_are_what_rounding_and_moved_weights_do():
    limits = band_of("bf16", GPT)

    def allowed(kind: str, *spreads: float | None) -> list[float]:
        tensors = [{"name": FIRST, "relative_difference": 1.0, "spread": spread} for spread in spreads]
        return reference._allowed(kind, getattr(comparison(**{kind: tensors}), kind), limits)

    assert allowed("gradients", 4e-3, 8e-3, 1e-3) == pytest.approx([1.2e-2, 2.4e-2, 1.2e-2])
    assert allowed("gradients", 1e-9, 1.0) == pytest.approx([1.5, 3.0])
    assert allowed("activations", 1e-9, 1e-9) == [2.0**-8] * 2
    # Adam takes an element a whole step, whichever way rounding points.
    assert allowed("weights", 1e-1, 1e-4) == pytest.approx([1e-1 + 2.0**-8, 1e-4 + 2.0**-8])
    assert allowed("weights", None, 1.0) == [limits.weights] * 2
    steps = reference._measured_steps(comparison(), limits)
    assert (steps.loss, steps.grad_norm) == pytest.approx((3e-4, 6e-3))


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({}, True),
        ({"perturbed": None}, False),
        ({"perturbed": [[]]}, False),
        ({"weights": [{"name": FIRST, "relative_difference": 0.0}]}, False),
        ({"float32_parts": None}, False),
        ({"float32_parts": [part("accumulation"), part("loss")]}, False),
    ],
)
def test_bands_that_were_not_measured_whole_are_none(changes, measured):
    case = typed(plan_of()).case(BASELINE)
    assert reference._is_measured(case, comparison(**changes)) is measured


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        ([part("accumulation", 1.8e-6)], []),
        # What float32 itself does was measured, and is more than usual.
        ([part("accumulation", 2.9e-5, 1e-5)], []),
        (
            [part("accumulation", 2e-6)],
            [f"accumulation in float32: {FIRST} is off by 2.00e-06 relative, allowed 1.9e-"],
        ),
        # Rounded to bf16 and to fp16: a sixteenth of a unit.
        ([part("softmax", 2.4e-4, bits=8), part("softmax", 3e-5, bits=11)], []),
        ([part("softmax", 2.5e-4, bits=8)], [f"softmax in float32: {FIRST} is off by 2.50e-04"]),
        ([part("softmax", 3.1e-5, bits=11)], [f"softmax in float32: {FIRST} is off by 3.10e-05"]),
        ([part("loss", None)], [f"loss in float32: {FIRST} is off by inf"]),
        # The first of each kind.
        ([part("loss", 1.0), part("loss", 2.0), part("main weights", 3.0)], ["loss in", "main weights in"]),
    ],
)
def test_what_is_kept_in_float32(parts, texts):
    problems = reference._float32(comparison(float32_parts=parts).float32_parts)
    assert [problem.text[: len(text)] for problem, text in zip(problems, texts, strict=True)] == texts
