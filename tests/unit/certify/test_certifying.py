"""The parts of `certify` that need no image: which cases are chosen, what is shown, how a failure is told."""

import json
from pathlib import Path

import pytest
from helpers.matrices import six_layouts

from envbuild.catalog.catalog import Catalog, Machine, select
from envbuild.catalog.models import Device
from envbuild.certify.cases import expand
from envbuild.certify.certifying import chosen_cases
from envbuild.certify.ground import Ground
from envbuild.certify.judge import Results, Verdict
from envbuild.certify.telling import failure, progress
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.core.progress import SilentReporter

CATALOG = Catalog.open(Path("/nonexistent"))
SELECTION = select(CATALOG, "mcore", "cpu", "debian12", Machine(distribution="debian", release="12"))
MATRIX = CATALOG.matrix("certify-quick")


def chosen(*only: str) -> list[str]:
    return [case.id for case in chosen_cases(MATRIX, "certify-quick", SELECTION, only)]


def test_all_cases_without_only():
    assert chosen() == [case.id for case in expand(MATRIX, "certify-quick", Ground(device=Device.CPU))]


@pytest.mark.parametrize(
    ("only", "ids"),
    [
        (["gpt-fp32-tp2"], ["gpt-fp32-baseline", "gpt-fp32-tp2"]),
        (["gpt-fp32-pp2", "gpt-fp32-dp2", "gpt-fp32-pp2"], ["gpt-fp32-baseline", "gpt-fp32-dp2", "gpt-fp32-pp2"]),
    ],
)
def test_only_brings_the_baseline_along(only, ids):
    assert chosen(*only) == ids


def test_only_an_unknown_case_lists_the_known():
    with pytest.raises(UsageError, match="has no case 'gpt-fp32-tp3'") as caught:
        chosen("gpt-fp32-tp3")
    assert "gpt-fp32-tp2" in caught.value.why


def test_only_a_baseline_compares_nothing():
    with pytest.raises(UsageError, match="gpt-fp32-baseline alone compares nothing") as caught:
        chosen("gpt-fp32-baseline")
    assert "gpt-fp32-tp2" in caught.value.fix


def test_matrix_of_baselines_compares_nothing():
    bare = MATRIX.model_copy(update={"cases": MATRIX.cases[:1]})
    with pytest.raises(ConfigurationError, match="compares nothing"):
        chosen_cases(bare, "bare", SELECTION, ())


class Shown(SilentReporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    update = note


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        ({"event": "case-started", "index": 2, "total": 6, "case": "c"}, ["case 2/6 c"]),
        ({"event": "step", "case": "c", "step": 3, "loss": 5.5}, ["c step 3: loss 5.50000"]),
        ({"event": "step", "case": "c", "step": 3, "loss": None}, ["c step 3: loss not finite"]),
        ({"event": "case-finished", "case": "c", "status": "failed", "seconds": 1.25}, ["  c: failed in 1.2 s"]),
        ({"event": "step"}, []),
        ({"event": "new"}, []),
        ({}, []),
        (["event"], []),
        (5, []),
    ],
)
def test_progress_of_events(event, shown):
    reporter = Shown()
    progress(reporter)(json.dumps(event))
    assert reporter.texts == shown


@pytest.mark.parametrize("line", ["", "words for people", "{", '"event"'])
def test_progress_leaves_other_lines_to_the_log(line):
    reporter = Shown()
    progress(reporter)(line)
    assert reporter.texts == []


CASES = expand(six_layouts(), "six", Ground(device=Device.CPU))
PASSED = tuple(Verdict(case=case, passed=True) for case in CASES)
FAILED = Verdict(case=CASES[1], passed=False, problems=("step 1: loss ...", "step 2: loss ..."))
FINDING = {"code": "version-differs", "package": "torch", "expected": "2.13.0+cpu", "found": "2.12.0"}


@pytest.mark.parametrize(
    ("verdicts", "findings", "finished_at", "what", "why"),
    [
        (
            (PASSED[0], FAILED, *PASSED[2:]),
            (),
            "t",
            "1 of 6 cases failed",
            ["gpt-fp32-dp2: step 1: loss ...", "gpt-fp32-dp2: step 2: loss ..."],
        ),
        (
            PASSED,
            (FINDING,),
            "t",
            "the environment is not what was locked",
            ["torch: the lock has 2.13.0+cpu, the image has 2.12.0"],
        ),
        (PASSED, (), None, "the runner did not come to its end", ["the runner ended before its last line"]),
    ],
)
def test_failure_names_cases_steps_findings_and_where_the_logs_are(verdicts, findings, finished_at, what, why):
    results = Results(
        environment={},
        environment_findings=findings,
        smoke_version="1",
        started_at="t",
        finished_at=finished_at,
        cases={},
    )
    error = failure(verdicts, results, Path("/run"))
    assert error.what == what
    assert len(error.why.splitlines()) == len(why)
    for part in why:
        assert part in error.why
    assert "No certificate was written" in error.fix
    assert "/run" in error.fix
    assert error.log == Path("/run/smoke.log")
