"""The judge passes agreement, step by step, and nothing else."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.models import Device
from envbuild.certify.cases import expand
from envbuild.certify.ground import Ground
from envbuild.certify.judge import RESULTS_SCHEMA, Verdict, judge, read_results, relative_difference
from envbuild.core.errors import CertificationFailedError

MATRIX = Catalog.open(Path("/nonexistent")).matrix("certify-quick")
CASES = expand(MATRIX, "certify-quick", Ground(device=Device.CPU))
BAND = MATRIX.tolerance["fp32"]
DIGEST, NONCE = "sha256:plan", "nonce"
LOSSES = [6.2413, 6.1007, 5.9871, 5.8512, 5.7003]
GRAD_NORMS = [1.7301, 1.5202, 1.4103, 1.3304, 1.2505]
TP2 = "gpt-fp32-tp2"
BASELINE = "gpt-fp32-baseline"


def steps() -> list[dict]:
    return [
        {"step": number, "loss": loss, "grad_norm": norm, "seconds": 0.1}
        for number, (loss, norm) in enumerate(zip(LOSSES, GRAD_NORMS, strict=True), 1)
    ]


def healthy() -> list[dict]:
    """The lines of a results file in which all cases agree to the last digit."""
    run = {
        "schema": RESULTS_SCHEMA, "type": "run", "plan_digest": DIGEST, "nonce": NONCE, "smoke_version": "1",
        "environment": {"packages": {}}, "environment_findings": [], "started_at": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    cases = [
        {"type": "case", "case": case.id, "status": "completed", "steps": steps(), "seconds": 1.0, "failure": None}
        for case in CASES
    ]
    return [run, *cases, {"type": "end", "finished_at": "2026-01-01T00:01:00Z"}]


def of(lines: list[dict], case: str) -> dict:
    return next(line for line in lines if line.get("case") == case)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "results.jsonl"


def verdicts(path: Path, lines: list[dict]) -> dict[str, Verdict]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {verdict.case.id: verdict for verdict in judge(CASES, MATRIX, read_results(path, DIGEST, NONCE))}


def failed(path: Path, lines: list[dict]) -> dict[str, tuple[str, ...]]:
    found = verdicts(path, lines)
    assert len(found) == len(CASES)
    return {name: verdict.problems for name, verdict in found.items() if not verdict.passed}


def test_agreement_passes(path):
    found = verdicts(path, healthy())
    assert all(verdict.passed and not verdict.problems for verdict in found.values())
    assert found[TP2].largest_loss_difference == found[TP2].largest_grad_norm_difference == 0
    assert found[BASELINE].largest_loss_difference is None
    assert [step.loss for step in found[TP2].steps] == LOSSES


@pytest.mark.parametrize(("number", "band"), [("loss", BAND.loss_relative), ("grad_norm", BAND.grad_norm_relative)])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("step", [1, 3, 5])
def test_one_number_at_the_tolerance(path, number, band, sign, step):
    lines = healthy()
    entry = of(lines, TP2)["steps"][step - 1]
    value = entry[number]
    entry[number] = value * (1 + sign * band * 0.99)
    found = verdicts(path, lines)
    assert all(verdict.passed for verdict in found.values())
    assert getattr(found[TP2], f"largest_{number}_difference") == pytest.approx(band * 0.99)

    entry[number] = value * (1 + sign * band * 1.01)
    problems = failed(path, lines)
    assert list(problems) == [TP2]
    (problem,) = problems[TP2]
    assert problem.startswith(f"step {step}: {number} expected {value:.8g}, found {entry[number]:.8g}: off by ")
    assert problem.endswith(f"allowed {band:g}")


def test_grad_norm_alone_fails_a_case(path):
    """A wrong gradient scale: the losses of the first step agree, and Adam hides it in the others."""
    lines = healthy()
    for entry in of(lines, TP2)["steps"]:
        entry["grad_norm"] *= 2
    problems = failed(path, lines)[TP2]
    assert len(problems) == len(LOSSES)
    assert all("grad_norm expected" in problem for problem in problems)


def test_difference_is_visible_in_the_words_also_for_small_numbers(path):
    lines = healthy()
    for case in CASES:
        for entry in of(lines, case.id)["steps"]:
            entry["grad_norm"] *= 1e-6
    of(lines, TP2)["steps"][0]["grad_norm"] *= 1.001
    (problem,) = failed(path, lines)[TP2]
    words = problem.replace(",", "").replace(":", "").split()
    assert words[words.index("expected") + 1] != words[words.index("found") + 1]


def test_tolerance_is_shown_as_stated(path):
    band = BAND.model_copy(update={"loss_relative": 2.5e-5})
    matrix = MATRIX.model_copy(update={"tolerance": {"fp32": band}})
    lines = healthy()
    of(lines, TP2)["steps"][0]["loss"] *= 1 + 2.6e-5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = next(v for v in judge(CASES, matrix, read_results(path, DIGEST, NONCE)) if not v.passed)
    assert "off by 2.60e-05 relative, allowed 2.5e-05" in verdict.problems[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("number", ["loss", "grad_norm"])
def test_number_that_is_none_fails_a_case(path, number, value):
    lines = healthy()
    of(lines, TP2)["steps"][2][number] = value
    assert failed(path, lines) == {TP2: (f"step 3: {number} is {value}",)}


@pytest.mark.parametrize("number", ["loss", "grad_norm"])
def test_null_is_how_the_runner_writes_a_number_that_is_none(path, number):
    lines = healthy()
    of(lines, TP2)["steps"][2][number] = None
    assert failed(path, lines) == {TP2: (f"step 3: {number} is nan",)}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_same_nan_everywhere_is_no_agreement(path, value):
    lines = healthy()
    for case in CASES:
        of(lines, case.id)["steps"][4]["loss"] = value
    assert set(failed(path, lines)) == {case.id for case in CASES}


@pytest.mark.parametrize("value", [0.0, -0.0, -1.5])
@pytest.mark.parametrize("number", ["loss", "grad_norm"])
def test_zeros_and_negative_numbers_are_no_agreement(path, number, value):
    """Where nothing is learned, every layout has the same numbers."""
    lines = healthy()
    for case in CASES:
        of(lines, case.id)["steps"][1][number] = value
    problems = failed(path, lines)
    assert set(problems) == {case.id for case in CASES}
    assert problems[BASELINE] == problems[TP2] == (f"step 2: {number} is {value}",)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda steps: steps[:-1],
        lambda steps: steps[1:],
        lambda steps: [],
        lambda steps: [*steps, {**steps[-1], "step": 6}],
        lambda steps: [*steps[:-1], steps[-2]],
        lambda steps: list(reversed(steps)),
        lambda steps: [{**step, "step": step["step"] - 1} for step in steps],
    ],
    ids=["last-missing", "first-missing", "none", "one-more", "one-twice", "reversed", "from-zero"],
)
def test_wrong_steps_fail_a_case(path, spoil):
    lines = healthy()
    of(lines, TP2)["steps"] = spoil(of(lines, TP2)["steps"])
    problems = failed(path, lines)
    assert list(problems) == [TP2]
    assert problems[TP2][0].startswith("steps 1 to 5 were expected, found [")


@pytest.mark.parametrize("status", ["failed", "timed-out", "not-run", "some-new-word", "", "Completed"])
def test_other_status_fails_a_case_whatever_its_numbers(path, status):
    lines = healthy()
    failure = {"rank": 1, "message": "RuntimeError: boom", "log": "logs/rank1.log"}
    of(lines, TP2).update(status=status, failure=failure)
    assert failed(path, lines) == {TP2: (f"{status}: RuntimeError: boom (rank 1: logs/rank1.log)",)}


def test_failure_without_a_reason(path):
    lines = healthy()
    of(lines, TP2).update(status="failed")
    assert failed(path, lines) == {TP2: ("failed: no reason was recorded",)}


@pytest.mark.parametrize("what", ["missing", "failed", "step-missing", "nan"])
def test_without_a_sound_baseline_nothing_passes(path, what):
    lines = healthy()
    baseline = of(lines, BASELINE)
    match what:
        case "missing":
            lines.remove(baseline)
        case "failed":
            baseline["status"] = "failed"
        case "step-missing":
            baseline["steps"].pop()
        case "nan":
            baseline["steps"][0]["loss"] = math.nan
    problems = failed(path, lines)
    assert set(problems) == {case.id for case in CASES}
    assert problems[TP2] == (f"its baseline {BASELINE} did not complete, so there is nothing to compare with",)


def test_case_without_results_fails(path):
    lines = healthy()
    lines.remove(of(lines, TP2))
    assert failed(path, lines) == {TP2: ("the runner reported nothing about it",)}


def test_results_without_an_end_have_no_end_time(path):
    """`certify` gives no certificate for those."""
    path.write_text("".join(json.dumps(line) + "\n" for line in healthy()[:-1]))
    assert read_results(path, DIGEST, NONCE).finished_at is None


def refused(path: Path, text: str, digest: str = DIGEST, nonce: str = NONCE) -> str:
    path.write_text(text)
    with pytest.raises(CertificationFailedError, match="cannot be judged") as caught:
        read_results(path, digest, nonce)
    assert caught.value.log == path
    return caught.value.why


TEXT = "".join(json.dumps(line) + "\n" for line in healthy())


@pytest.mark.parametrize(("digest", "nonce"), [("sha256:other", NONCE), (DIGEST, "other")])
def test_results_of_another_plan_are_refused(path, digest, nonce):
    assert "another plan" in refused(path, TEXT, digest, nonce)


def test_truncated_results_are_refused(path):
    assert "no JSON" in refused(path, TEXT[: len(TEXT) // 2])


def test_missing_results_are_refused(path):
    with pytest.raises(CertificationFailedError) as caught:
        read_results(path, DIGEST, NONCE)
    assert caught.value.why == "The runner wrote no results."


def test_case_that_is_there_twice_is_refused(path):
    lines = healthy()
    lines.insert(1, of(lines, TP2))
    assert refused(path, "".join(json.dumps(line) + "\n" for line in lines)) == "A case is in it twice."


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"schema": "envbuild.results/1"', '"schema": "envbuild.results/2"'),
        ('"type": "run"', '"type": "ran"'),
        ('"nonce"', '"once"'),
        ('"steps"', '"step"'),
        ('"seconds": 1.0', '"seconds": null'),
        ('"loss": 6.2413', '"loss": "x"'),
        ('"loss": 6.2413', '"loss": []'),
        ('"loss": 6.2413', '"loss": 1' + "0" * 400),
    ],
)
def test_malformed_results_are_refused(path, old, new):
    assert old in TEXT
    assert refused(path, TEXT.replace(old, new, 1))


@pytest.mark.parametrize("text", ["", "\n\n", "[]\n", "1\n", "null\n", '"run"\n', "\x00", "{}\n"])
def test_other_files_are_refused(path, text):
    assert refused(path, text)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "results.jsonl"
    path.write_bytes(data)
    with pytest.raises(CertificationFailedError):
        read_results(path, DIGEST, NONCE)


@given(st.integers(0, len(TEXT) - 1))
def test_any_truncation_gives_no_full_set_of_passes_with_an_end(tmp_path_factory, length):
    path = tmp_path_factory.mktemp("cut") / "results.jsonl"
    path.write_text(TEXT[:length])
    try:
        results = read_results(path, DIGEST, NONCE)
    except CertificationFailedError:
        return
    sound = all(verdict.passed for verdict in judge(CASES, MATRIX, results))
    assert not sound or results.finished_at is None or TEXT[length:] == "\n"


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [(2.0, 2.0, 0.0), (2.0, 2.5, 0.25), (2.0, 1.5, 0.25), (-2.0, 2.0, 2.0), (0.0, 0.0, 0.0), (0.0, 1e-9, math.inf)],
)
def test_relative_difference(expected, found, difference):
    assert relative_difference(expected, found) == difference
