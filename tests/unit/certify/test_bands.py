"""Bands are what moved weights do to a baseline, times one factor, between a floor and the matrix's limit."""

import pytest
from helpers.notes import Notes
from unit.certify.plans import BASELINE, CASES, MATRIX, TP2, line, lines_of, plan_of, read, typed

from envbuild.catalog.matrix import Band
from envbuild.certify.judge.bands import FACTOR, FLOOR, Bands, spread_of
from envbuild.certify.judge.judge import judge
from envbuild.certify.models import Spread
from envbuild.certify.report.console import show

LIMIT = Band(loss_relative=1e-3, grad_norm_relative=1e-2, weights_relative=1e-2)
FC1, FC2 = (f"decoder.layers.0.mlp.linear_fc{number}.weight" for number in (1, 2))


@pytest.fixture
def lines():
    """Results whose baseline was moved little: by 1e-6 in all that is measured."""
    lines = lines_of(plan_of())
    baseline = line(lines, BASELINE)
    for run in baseline["perturbed"]:
        run["weights"] = 1e-6
        run["steps"] = [
            {"step": step["step"], **{name: step[name] * (1 + 1e-6) for name in ("loss", "grad_norm")}}
            for step in baseline["steps"]
        ]
    return lines


@pytest.fixture
def verdict(tmp_path, lines):
    """Judges the lines: the verdict on a case."""

    def judged(case=TP2):
        plan = {**plan_of(), "nonce": lines[0]["nonce"]}
        lines[0] |= {"plan_digest": lines_of(plan)[0]["plan_digest"]}
        verdicts = judge(CASES, MATRIX, read(tmp_path / "results.jsonl", plan, lines), typed(plan))
        return next(verdict for verdict in verdicts if verdict.id == case)

    return judged


def checks(verdict):
    return {problem.check for problem in verdict.problems}


@pytest.mark.parametrize(
    ("spread", "band"), [(0.0, FLOOR), (FLOOR / FACTOR / 2, FLOOR), (1e-5, FACTOR * 1e-5), (1.0, 1e-3)]
)
def test_band_of_a_spread(spread, band):
    bands = Bands(Spread(runs=4, loss=(0.0, spread), grad_norm=(0.0, 0.0), weights=None), LIMIT)
    assert bands.of_step("loss", 1) == pytest.approx(band)
    assert bands.of_step("loss", 0) == FLOOR
    assert bands.weights == LIMIT.weights_relative


def test_spread_of_a_step_is_the_largest_up_to_it(lines, tmp_path):
    runs = line(lines, BASELINE)["perturbed"]
    runs[0] = {**runs[0], "steps": [dict(step) for step in runs[0]["steps"]]}
    runs[0]["steps"][1]["loss"] *= 1 + 1e-4
    plan = {**plan_of(), "nonce": lines[0]["nonce"]}
    lines[0] |= {"plan_digest": lines_of(plan)[0]["plan_digest"]}
    spread = spread_of(read(tmp_path / "results.jsonl", plan, lines).case(BASELINE), 4)
    assert spread.loss == pytest.approx((1e-6, *[1e-4] * 4), rel=0.02)
    assert spread.grad_norm == pytest.approx((1e-6,) * 5, rel=0.02)
    assert (spread.runs, spread.weights) == (4, 1e-6)


@pytest.mark.parametrize(("name", "check"), [("loss", "parity-loss"), ("grad_norm", "parity-grad-norm")])
@pytest.mark.parametrize(("share", "passed"), [(0.9, True), (1.1, False)])
def test_step_within_its_band(verdict, lines, name, check, share, passed):
    line(lines, TP2)["steps"][2][name] *= 1 + share * FACTOR * 1e-6
    judged = verdict()
    assert (judged.passed, checks(judged)) == (passed, set() if passed else {check})
    assert getattr(judged.tolerance, name) == pytest.approx(FACTOR * 1e-6, rel=0.02)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"norm": 1.001}, f"the gradient of {FC1} in the first step has another norm: off by 1.00e-03"),
        ({"projections": [1.0] * 4}, f"the gradient of {FC1} in the first step has another direction: off by 1.41"),
        ({"name": "other"}, f"its gradients of the first step are not those of its baseline's tensors: {FC1}, other"),
    ],
)
def test_gradient_of_one_tensor_that_is_off(verdict, lines, change, text):
    case = line(lines, TP2)
    case["gradients"] = [{**case["gradients"][0], **change}, case["gradients"][1]]
    judged = verdict()
    assert [problem.text[: len(text)] for problem in judged.problems] == [text]
    assert checks(judged) == {"parity-gradients"}


def test_worst_gradient_is_named_and_how_many_others_are_off(verdict, lines):
    case = line(lines, TP2)
    case["gradients"] = [
        {**gradient, "norm": norm} for gradient, norm in zip(case["gradients"], (1.001, 3.0), strict=True)
    ]
    (problem,) = verdict().problems
    assert problem.text.startswith(f"the gradient of {FC2} in the first step has another norm: off by 5.00e-01")
    assert problem.text.endswith("that is allowed; it is the worst of 2 that are off, of 2")


def test_steps_that_are_off_are_one_problem(verdict, lines):
    for step, factor in zip(line(lines, TP2)["steps"], (1, 1.01, 1.03, 1.02, 1), strict=True):
        step["loss"] *= factor
    (problem,) = verdict().problems
    assert problem.text.startswith("step 2: loss expected ")
    assert problem.text.endswith("allowed 3e-06; 3 of 5 steps are off, step 3 the most, by 3.00e-02")


def test_band_at_the_limit_of_the_matrix_is_named(lines, verdict):
    case, limit = line(lines, TP2), MATRIX.tolerance["fp32"].loss_relative
    for step in line(lines, BASELINE)["perturbed"][0]["steps"]:
        step["loss"] *= 1.5
    case["steps"][0]["loss"] *= 1 + 2 * limit
    judged = verdict()
    limited = "(the matrix's limit; 3 times the measured spread is 1.5)"
    assert judged.problems[0].text.endswith(f"allowed {limit:g} {limited}")
    reporter = Notes()
    show([verdict(BASELINE), judged], [], reporter)
    assert (
        f"  note      {BASELINE}: the matrix's tolerance limits the bands of its cases: loss {limit:.2g} (measured 1.5)"
        in reporter.lines
    )


def test_gradient_that_is_zero_but_for_rounding_has_a_band_of_its_own(verdict, lines):
    """Adding a constant to all keys changes no attention: the gradient of that bias is rounding alone."""
    name = "decoder.layers.0.self_attention.linear_qkv.bias"

    def rounding(number):
        return {"name": name, "norm": 1e-9 * number, "projections": [1e-9 * number, 0.0] * 2}

    for case in CASES:
        line(lines, case.id)["gradients"] = [*line(lines, case.id)["gradients"], rounding(3 if case.id == TP2 else 1)]
    for run in line(lines, BASELINE)["perturbed"]:
        run["gradients"] = [*run["gradients"], rounding(2)]
    assert verdict().passed
    case = line(lines, TP2)
    case["gradients"] = [{**case["gradients"][0], "norm": 1.001}, *case["gradients"][1:]]
    assert checks(verdict()) == {"parity-gradients"}


@pytest.mark.parametrize(("count", "caught"), [(1, FACTOR * 1e-6), (4, None)], ids=["one", "most"])
def test_gradient_that_is_there_only_with_moved_weights_is_not_compared(verdict, lines, count, caught):
    """An expert of a router may get no token in the first step, and one when the weights move."""
    none = [{"name": f"expert{number}", "norm": 0.0, "projections": [0.0] * 4} for number in range(count)]
    some = [{**gradient, "norm": 1e-3, "projections": [1e-3] * 4} for gradient in none]
    for case in CASES:
        line(lines, case.id)["gradients"] = [*line(lines, case.id)["gradients"], *none]
    for run in line(lines, BASELINE)["perturbed"]:
        run["gradients"] = [*run["gradients"], *some]
    for gradients in (none, some):
        line(lines, TP2)["gradients"] = [*line(lines, TP2)["gradients"][:2], *gradients]
        judged = verdict()
        assert judged.passed
        assert judged.tolerance.gradients == pytest.approx(FACTOR * 1e-6)
    assert verdict(BASELINE).spread.caught == (caught and pytest.approx(caught))
    line(lines, TP2)["gradients"][0] = {**line(lines, TP2)["gradients"][0], "norm": 1.001}
    assert checks(verdict()) == {"parity-gradients"}


def test_gradient_that_is_listed_twice_is_a_problem(verdict, lines):
    first, *others = line(lines, TP2)["gradients"]
    line(lines, TP2)["gradients"] = [{**first, "norm": 7.0}, first, *others]
    (problem,) = verdict().problems
    assert (problem.check, problem.text.rpartition(": ")[2]) == ("parity-gradients", FC1)


@pytest.mark.parametrize("perturbed", [None, [], "short", "few", "more"])
def test_baseline_whose_moved_trainings_are_missing(verdict, lines, perturbed):
    baseline = line(lines, BASELINE)
    run = baseline["perturbed"][0]
    runs, short = baseline["perturbed"], {**run, "steps": run["steps"][:-1]}
    made = {"short": [*runs[1:], short], "few": [run], "more": [*runs, short]}
    baseline["perturbed"] = made[perturbed] if perturbed else perturbed
    assert checks(verdict(BASELINE)) == checks(verdict()) == {"baseline"}


def test_power_of_the_judge_is_in_the_verdict(verdict):
    assert verdict(BASELINE).spread.caught == pytest.approx(FACTOR * 1e-6, rel=0.02)
