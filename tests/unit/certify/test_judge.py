"""The judge passes agreement, step by step, and nothing else; each problem has the code of its check."""

import math
from dataclasses import replace

import pytest
from unit.certify.plans import BASELINE, CASES, MATRIX, TP2, line, lines_of, observed, plan_of, read, typed, with_case

from envbuild.certify.judge.config_checks import observed_problems
from envbuild.certify.judge.judge import judge
from envbuild.certify.judge.numbers import relative_difference
from envbuild.certify.models import Numbers

# One micro batch a rank with data = 2.
LARGE = replace(MATRIX.training, micro_batch_size=8)
BAND = MATRIX.tolerance["fp32"]
DP2 = "gpt-fp32-dp2"
STEPS = MATRIX.training.steps


@pytest.fixture
def plan():
    return plan_of()


@pytest.fixture
def lines(plan):
    return lines_of(plan)


@pytest.fixture
def judged(tmp_path):
    """Judges lines of a plan: the verdicts, by ID (and repeat, where the plan has several)."""

    def verdicts(plan, lines, cases=CASES):
        results = read(tmp_path / "results.jsonl", plan, lines)
        judged_cases = judge(cases, MATRIX, results, typed(plan))
        return {
            (verdict.id, verdict.repeat) if plan["repeats"] > 1 else verdict.id: verdict for verdict in judged_cases
        }

    return verdicts


@pytest.fixture
def failed(judged):
    """The problems of what did not pass, as (check, text)."""

    def problems(plan, lines, cases=CASES):
        by_name = judged(plan, lines, cases)
        assert len(by_name) == len(CASES) * plan["repeats"]
        assert all(bool(verdict.problems) is not verdict.passed for verdict in by_name.values())
        return {
            name: [(problem.check, problem.text) for problem in verdict.problems]
            for name, verdict in by_name.items()
            if not verdict.passed
        }

    return problems


def test_agreement_passes(judged):
    plan = plan_of()
    by_name = judged(plan, lines_of(plan))
    assert all(verdict.passed and not verdict.problems for verdict in by_name.values())
    tp2, baseline = by_name[TP2], by_name[BASELINE]
    assert tp2.largest_relative_difference == Numbers(loss=0, grad_norm=0, weights=0, gradients=0)
    limits = {"loss": BAND.loss_relative, "grad_norm": BAND.grad_norm_relative, "weights": BAND.weights_relative}
    band = Numbers(**limits, gradients=tp2.tolerance.gradients)
    assert band.gradients == pytest.approx(3e-6)
    assert (tp2.tolerance, tp2.devices, tp2.seconds) == (band, (0, 1), 1.5)
    assert by_name[DP2].largest_relative_difference.weights is None
    assert tp2.observed["layer_spec"] == "local"
    assert (baseline.largest_relative_difference, baseline.tolerance) == (Numbers(), Numbers())
    assert [step.loss for step in tp2.steps] == [6.375, 6.25, 6.125, 6.0, 5.875]


# ---- loss and grad norm


@pytest.mark.parametrize(
    ("number", "check", "band"),
    [("loss", "parity-loss", BAND.loss_relative), ("grad_norm", "parity-grad-norm", BAND.grad_norm_relative)],
)
@pytest.mark.parametrize(("sign", "step"), [(1, 1), (-1, 3), (1, 5)])
def test_one_number_at_the_tolerance(judged, failed, number, check, band, sign, step, plan, lines):
    entry = line(lines, TP2)["steps"][step - 1]
    value = entry[number]
    entry[number] = value * (1 + sign * band * 0.99)
    by_name = judged(plan, lines)
    assert all(verdict.passed for verdict in by_name.values())
    assert getattr(by_name[TP2].largest_relative_difference, number) == pytest.approx(band * 0.99)

    entry[number] = value * (1 + sign * band * 1.01)
    ((name, ((code, text),)),) = failed(plan, lines).items()
    assert (name, code) == (TP2, check)
    assert text.startswith(f"step {step}: {number} expected {value:.8g}, found {entry[number]:.8g}: off by ")
    assert f" relative, allowed {band:g} (the matrix's limit; 3 times the measured spread is " in text


def test_difference_is_visible_in_the_words_also_for_small_numbers(failed, plan, lines):
    for case in CASES:
        for entry in line(lines, case.id)["steps"]:
            entry["grad_norm"] *= 1e-6
    line(lines, TP2)["steps"][0]["grad_norm"] *= 1.001
    ((_, text),) = failed(plan, lines)[TP2]
    words = text.replace(",", "").replace(":", "").split()
    assert words[words.index("expected") + 1] != words[words.index("found") + 1]


def test_the_same_nan_everywhere_is_no_agreement(failed):
    plan = plan_of()
    lines = lines_of(plan, scale={case.id: math.nan for case in CASES})
    by_case = failed(plan, lines)
    assert set(by_case) == {case.id for case in CASES}
    assert {check for problems in by_case.values() for check, _ in problems} == {"not-finite"}


@pytest.mark.parametrize(("number", "value"), [("loss", 0.0), ("loss", -1.5), ("grad_norm", -0.0), ("grad_norm", None)])
def test_zeros_and_negative_numbers_are_no_agreement(failed, number, value, plan, lines):
    """Where nothing is learned, every layout has the same numbers."""
    for case in CASES:
        line(lines, case.id)["steps"][1][number] = value
    by_case = failed(plan, lines)
    assert set(by_case) == {case.id for case in CASES}
    shown = "not finite" if value is None else value
    assert by_case[BASELINE] == by_case[TP2] == [("not-finite", f"step 2: {number} is {shown}")]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda steps: steps[:-1],
        lambda steps: steps[1:],
        lambda steps: [],
        lambda steps: [*steps, {**steps[-1], "step": 6}],
        lambda steps: [*steps[:-1], steps[-2]],
        lambda steps: list(reversed(steps)),
    ],
    ids=["last-missing", "first-missing", "none", "one-more", "one-twice", "reversed"],
)
def test_wrong_steps_fail_a_case(failed, spoil, plan, lines):
    line(lines, TP2)["steps"] = spoil(line(lines, TP2)["steps"])
    ((name, ((check, text),)),) = failed(plan, lines).items()
    assert (name, check) == (TP2, "steps")
    assert text.startswith("steps 1 to 5 were expected, found [")


# ---- data parallel, digit for digit


def test_data_parallel_with_the_same_arithmetic_must_have_the_same_digits(failed):
    cases = with_case(DP2, training=LARGE)
    plan = plan_of(cases=cases)
    lines = lines_of(plan)
    assert failed(plan, lines, cases) == {}
    entry = line(lines, DP2)["steps"][3]
    entry["loss"] = math.nextafter(entry["loss"], 7)
    ((name, ((check, text),)),) = failed(plan, lines, cases).items()
    assert (name, check) == (DP2, "data-parallel-bits")
    assert text.startswith("step 4: data parallel does the baseline's arithmetic, and differs from it: loss 6.000000")
    plain = plan_of()
    assert failed(plain, [lines_of(plain)[0], *lines[1:]]) == {}


def test_data_parallel_with_the_same_arithmetic_must_have_the_same_weights(failed):
    cases = with_case(DP2, training=LARGE, compare_weights=True)
    plan = plan_of(cases=cases)
    lines = lines_of(plan)
    line(lines, DP2)["weights"]["largest_relative_difference"] = 1e-12
    ((name, ((check, text),)),) = failed(plan, lines, cases).items()
    assert (name, check) == (DP2, "data-parallel-bits")
    assert text == "the final weights differ from the baseline's by 1.00e-12, and must not"


# ---- final weights


COMPARED = with_case(TP2, compare_weights=True)


def test_weights_within_the_tolerance_pass(judged, failed):
    plan = plan_of(cases=COMPARED)
    lines = lines_of(plan)
    line(lines, TP2)["weights"].update(largest_relative_difference=BAND.weights_relative * 0.99, worst="w")
    verdict = judged(plan, lines, COMPARED)[TP2]
    assert verdict.passed
    assert verdict.largest_relative_difference.weights == BAND.weights_relative * 0.99
    line(lines, TP2)["weights"]["largest_relative_difference"] *= 1.1
    ((_, ((check, text),)),) = failed(plan, lines, COMPARED).items()
    assert check == "parity-weights"
    assert text.startswith("final weights: w is off by ")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "and were not compared"),
        ({"compared_with": DP2}, f"and were compared with {DP2}"),
        ({"tensors": 0}, "were to be compared"),
        ({"missing": ["layer.3"]}, "its final checkpoint lacks layer.3"),
        ({"missing": list("abcdefg")}, "its final checkpoint lacks a, b, c, d, e ..."),
        ({"unexpected": ["layer.4"]}, "its final checkpoint has, and its baseline has not, layer.4"),
        ({"largest_relative_difference": None, "worst": "w"}, "final weights: w is off by nan"),
    ],
)
def test_weights_that_are_not_the_baselines_fail_a_case(failed, weights, message):
    plan = plan_of(cases=COMPARED)
    lines = lines_of(plan)
    case = line(lines, TP2)
    case["weights"] = weights and {**case["weights"], **weights}
    ((name, ((check, text),)),) = failed(plan, lines, COMPARED).items()
    assert (name, check) == (TP2, "parity-weights")
    assert message in text


# ---- ranks that failed


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("exception", "rank-exception"),
        ("exit", "rank-exit"),
        ("signal", "rank-signal"),
        ("timeout", "timeout"),
        ("baseline-missing", "baseline"),
        ("incomplete", "steps"),
        ("not-finite", "not-finite"),
    ],
)
@pytest.mark.parametrize("status", ["failed", "not-run"])
def test_other_status_fails_a_case_whatever_its_numbers(failed, status, kind, check, plan, lines):
    failure = {"rank": 1, "exit_status": 1, "kind": kind, "message": "boom", "log": "logs/rank1.log"}
    line(lines, TP2).update(status=status, failure=failure)
    lines[-1]["completed"] -= 1
    assert failed(plan, lines) == {TP2: [(check, f"{status}: boom (rank 1: logs/rank1.log)")]}


def test_rank_that_exits_0_without_steps_is_not_reported(failed, plan, lines):
    """Exit 0 is no evidence: NeMo-Run's experiment exits 0 after a failed job."""
    failure = {"rank": None, "exit_status": 0, "kind": "incomplete", "message": "no steps", "log": None}
    line(lines, TP2).update(status="failed", steps=[], failure=failure)
    lines[-1]["completed"] -= 1
    assert failed(plan, lines) == {TP2: [("not-reported", "failed: no steps")]}


@pytest.mark.parametrize("what", ["missing", "failed", "step-missing", "nan"])
def test_without_a_sound_baseline_nothing_passes(failed, what, plan, lines):
    baseline = line(lines, BASELINE)
    match what:
        case "missing":
            lines.remove(baseline)
            lines[-1].update(cases=len(CASES) - 1, completed=len(CASES) - 1)
        case "failed":
            failure = {"rank": 0, "exit_status": 1, "kind": "exit", "message": "m", "log": None}
            baseline.update(status="failed", failure=failure)
            lines[-1]["completed"] -= 1
        case "step-missing":
            baseline["steps"].pop()
        case "nan":
            baseline["steps"][0]["loss"] = None
    by_case = failed(plan, lines)
    assert set(by_case) == {case.id for case in CASES}
    assert by_case[TP2] == [
        ("baseline", f"its baseline {BASELINE} did not complete, so there is nothing to compare with")
    ]


def test_case_that_the_runner_left_out_fails(failed, plan, lines):
    lines.remove(line(lines, TP2))
    lines[-1].update(cases=len(CASES) - 1, completed=len(CASES) - 1)
    assert failed(plan, lines) == {TP2: [("not-reported", "the runner reported nothing about it")]}


# ---- what was built

BASE = typed(plan_of()).case(BASELINE)
MODEL = replace(typed(plan_of()).models["gpt"], layer_spec="transformer-engine", normalization="RMSNorm")


def test_layers_that_replay_no_graph_although_they_are_to(failed, plan):
    case = next(case for case in plan["cases"] if case["id"] == TP2)
    case["settings"]["cuda_graph_impl"] = "transformer_engine"
    lines = lines_of(plan)
    assert failed(plan, lines) == {}
    line(lines, TP2)["observed"]["cuda_graphs"] = 0
    expected = ("observed", "no layer replays a CUDA graph, and cuda_graph_impl asks for it")
    assert failed(plan, lines) == {TP2: [expected]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_dropout", 0.1),
        ("attention_dropout", 0.1),
        ("attention_backend", "fused"),
        ("layer_spec", "transformer-engine"),
        ("normalization", "RMSNorm"),
        ("distributed_optimizer", True),
        ("params_dtype", "torch.bfloat16"),
        ("gradients_dtype", "bfloat16"),
        ("main_weights_dtype", "bfloat16"),
        ("main_weights_dtype", None),
        ("loss_scale", 2.0),
    ],
)
@pytest.mark.parametrize("case", [TP2, BASELINE])
def test_what_was_built_must_be_what_was_planned(failed, case, name, value, plan, lines):
    line(lines, case)["observed"][name] = value
    ((check, text),) = failed(plan, lines)[case]
    assert check == "observed"
    assert text.startswith(f"{name}: the plan asks for ")


@pytest.mark.parametrize(("name", "other"), [("parameters", 7), ("samples_digest", "sha256:other")])
def test_what_a_case_was_trained_with_must_be_its_baselines(failed, name, other, plan, lines):
    line(lines, TP2)["observed"][name] = other
    ((case, ((check, text),)),) = failed(plan, lines).items()
    assert (case, check) == (TP2, "observed")
    assert f"differ from its baseline's: {other}, not " in text


@pytest.mark.parametrize(
    ("backend", "precision", "passes"),
    [
        ("flash", "bf16", True),
        ("fused", "bf16", True),
        ("unfused", "fp32", True),
        # Transformer Engine falls back to it, and says nothing.
        ("unfused", "bf16", False),
        ("unfused", "fp8", False),
        ("local", "bf16", False),
        ("none", "bf16", False),
    ],
)
def test_attention_that_was_left_open_is_one_of_the_engines(backend, precision, passes):
    case = replace(BASE, precision=precision, settings=replace(BASE.settings, attention_backend="auto"))
    kept_in = "float32" if precision == "fp32" else "bfloat16,float32"
    seen = observed(case, MODEL, attention_backend=backend, params_dtype=kept_in)
    assert (observed_problems(case, MODEL, seen, None) == []) is passes
    assert observed_problems(case, MODEL, replace(seen, params_dtype="float16"), None)


def test_attention_of_another_class_than_the_baselines_fails_a_case(failed, plan, lines):
    line(lines, TP2)["observed"]["attention"] = "OtherAttention"
    text = "its attention is OtherAttention, its baseline's is DotProductAttention"
    assert failed(plan, lines) == {TP2: [("observed", text)]}
    next(case for case in plan["cases"] if case["id"] == TP2)["layout"]["context"] = 2
    split = lines_of(plan)
    line(split, TP2)["observed"]["attention"] = "OtherAttention"
    assert failed(plan, split) == {}


def test_nothing_observed_is_no_agreement(failed, plan, lines):
    line(lines, TP2)["observed"] = None
    assert failed(plan, lines) == {TP2: [("observed", "the driver reported nothing of what it built")]}


def test_library_that_a_process_had_twice_fails_a_case(failed, plan, lines):
    line(lines, TP2)["observed"]["libraries"] = {"libnccl.so.2": ["/b", "/a"], "libcudnn.so.9": ["/c", "/c"]}
    assert failed(plan, lines) == {TP2: [("environment", "library-twice: libnccl.so.2 was loaded from /a and /b")]}


# ---- fine-tuning

FINETUNED = {
    "parameters": 100,
    "trainable_parameters": 100,
    "hugging_face": {"tensors": 51, "differing": [], "logits": 3e-6, "spread": 1.5e-6},
}


def finetuning_problems(finetune, report, baseline=None, **layout):
    case = replace(BASE, layout=replace(BASE.layout, **layout), training=replace(BASE.training, finetune=finetune))
    seen, expected = observed(case, MODEL, **report), baseline and observed(case, MODEL, **baseline)
    return [(problem.check, problem.text) for problem in observed_problems(case, MODEL, seen, expected)]


def test_fine_tuning_that_agrees_with_hugging_face_passes():
    assert finetuning_problems("sft", FINETUNED) == []
    assert finetuning_problems("lora", FINETUNED | {"trainable_parameters": 9}) == []
    halves = FINETUNED["hugging_face"] | {"logits": None, "spread": None}
    assert finetuning_problems("sft", FINETUNED | {"hugging_face": halves}, pipeline=2) == []


@pytest.mark.parametrize(
    ("hugging_face", "text"),
    [
        ({"logits": 5e-6}, "its logits are off by 5.00e-06 relative from Hugging Face's, allowed 4.5e-06"),
        ({"logits": math.nan}, "its logits are off by nan"),
        ({"logits": 0.1, "spread": 0.06}, "Hugging Face's own logits are off by 6.00e-02"),
        ({"logits": None}, "its logits were not compared"),
        ({"differing": ["a", "b"]}, "of 51 tensors that were exported 2 are not those imported: a, b"),
        ({"tensors": 0}, "the driver reported nothing of the Hugging Face model"),
    ],
)
def test_model_that_is_imported_or_exported_as_another_fails(hugging_face, text):
    hugging_face = FINETUNED | {"hugging_face": FINETUNED["hugging_face"] | hugging_face}
    ((check, shown),) = finetuning_problems("sft", hugging_face)
    assert check == "hugging-face"
    assert shown.startswith(text)


@pytest.mark.parametrize(
    ("finetune", "trained", "text"),
    [
        ("sft", 9, "sft trains 9 of 100 parameters"),
        ("lora", 100, "lora trains 100 of 100 parameters"),
        ("lora", 0, "lora trains 0 of 100 parameters"),
        ("lora", 8, "it trains 8 parameters, and its baseline 9"),
    ],
)
def test_fine_tuning_of_other_parameters_fails(finetune, trained, text):
    baseline = {"parameters": 100, "trainable_parameters": 9}
    report = FINETUNED | {"trainable_parameters": trained}
    assert finetuning_problems(finetune, report, baseline) == [("observed", text)]


# ---- repeats


def test_every_repeat_is_judged_with_its_own_baseline(failed):
    plan = plan_of(repeats=3)
    lines = lines_of(plan)
    assert failed(plan, lines) == {}
    line(lines, TP2, 2)["steps"][0]["loss"] *= 2
    by_repeat = failed(plan, lines)
    assert list(by_repeat) == [(TP2, 2)]
    assert [check for check, _ in by_repeat[TP2, 2]] == ["parity-loss", "repeats"]


def test_repeats_on_the_cpu_must_have_the_same_digits_and_on_gpus_not(failed):
    plan = plan_of(repeats=2)
    lines = lines_of(plan)
    entry = line(lines, TP2, 2)["steps"][4]
    entry["grad_norm"] = math.nextafter(entry["grad_norm"], 1)
    ((name, ((check, text),)),) = failed(plan, lines).items()
    assert (name, check) == ((TP2, 2), "repeats")
    assert text.startswith("step 5 differs from repeat 1: ")
    gpu = plan_of(repeats=2, device="cuda", gpu={"sm": ["90"]}, nonce=plan["nonce"])
    assert failed(gpu, [lines_of(gpu)[0], *lines[1:]]) == {}


# ---- what a baseline and a difference are


def test_baseline_that_learns_nothing_is_no_baseline(failed, plan, lines):
    agreeing = line(lines, BASELINE)["reference"]
    for case in CASES:
        for entry in line(lines, case.id)["steps"]:
            entry["loss"] = entry["grad_norm"] = 1.0
        line(lines, case.id)["reference"] = {**agreeing, "steps": [{"loss": 1.0, "grad_norm": 1.0}] * STEPS}
    assert failed(plan, lines) == {
        case.id: [("baseline", "its loss is 1.0 at every step: nothing was trained")]
        for case in CASES
        if case.is_baseline
    }


@pytest.mark.parametrize(
    ("expected", "number", "difference"),
    [(2.0, 2.0, 0.0), (2.0, 2.5, 0.25), (2.0, 1.5, 0.25), (-2.0, 2.0, 2.0), (0.0, 0.0, 0.0), (0.0, 1e-9, math.inf)],
)
def test_relative_difference(expected, number, difference):
    assert relative_difference(expected, number) == difference
