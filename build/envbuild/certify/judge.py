"""The judge: a case passes when every step's loss and gradient norm agree with its baseline's, and only then.

That the job ended, or that the loss fell, is no evidence: a wrong gradient scale and a wrong interleaved pipeline
both train.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.catalog.models import Band, Matrix
from envbuild.certify.cases import Case
from envbuild.certify.plan import tolerance_of
from envbuild.core.errors import CertificationFailedError

RESULTS_SCHEMA = "envbuild.results/1"


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one training step measured."""

    step: int
    loss: float
    grad_norm: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What the runner says about a case."""

    case: str
    status: str
    steps: tuple[Step, ...]
    seconds: float
    failure: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Results:
    """A results.jsonl that belongs to one plan."""

    environment: Mapping[str, Any]
    environment_findings: tuple[Mapping[str, Any], ...]
    smoke_version: str
    started_at: str
    finished_at: str | None
    cases: Mapping[str, CaseResult]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of a case: it passed, or why not."""

    case: Case
    passed: bool
    problems: tuple[str, ...] = ()
    largest_loss_difference: float | None = None
    largest_grad_norm_difference: float | None = None
    seconds: float | None = None
    steps: tuple[Step, ...] = field(default=())


def read_results(path: Path, plan_digest: str, nonce: str) -> Results:
    """Read a results.jsonl.

    Raises:
        CertificationFailedError: missing, truncated, malformed, or of another plan.
    """

    def refuse(why: str) -> CertificationFailedError:
        return CertificationFailedError(
            f"the results in {path} cannot be judged", why=why, fix="Run the certification again.", log=path, cases=()
        )

    try:
        lines = path.read_text().splitlines()
        records: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
    except FileNotFoundError:
        raise refuse("The runner wrote no results.") from None
    except ValueError as error:
        raise refuse(f"A line is no JSON: {error}") from error
    try:
        run = records[0]
        if run["type"] != "run" or run["schema"] != RESULTS_SCHEMA:
            raise refuse(f"The first line is {run.get('type')!r} of schema {run.get('schema')!r}.")
        if run["plan_digest"] != plan_digest or run["nonce"] != nonce:
            raise refuse("They are the results of another plan (its digest or nonce differs).")
        found = [_case_result(record) for record in records if record["type"] == "case"]
        if len({result.case for result in found}) != len(found):
            raise refuse("A case is in it twice.")
        end = next((record for record in records if record["type"] == "end"), None)
        return Results(
            environment=run["environment"],
            environment_findings=tuple(run["environment_findings"]),
            smoke_version=run["smoke_version"],
            started_at=run["started_at"],
            finished_at=end["finished_at"] if end else None,
            cases={result.case: result for result in found},
        )
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise refuse(f"It lacks a field or has one of the wrong kind: {error!r}") from error


def _number(value: object) -> float:
    """JSON has no NaN and no infinity: the runner writes null for a number that is not finite."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _case_result(record: Mapping[str, Any]) -> CaseResult:
    steps = tuple(
        Step(
            step=int(step["step"]),
            loss=_number(step["loss"]),
            grad_norm=_number(step["grad_norm"]),
            seconds=float(step["seconds"]),
        )
        for step in record["steps"]
    )
    return CaseResult(
        case=record["case"],
        status=record["status"],
        steps=steps,
        seconds=float(record["seconds"]),
        failure=record["failure"],
    )


def judge(cases: tuple[Case, ...], matrix: Matrix, results: Results) -> tuple[Verdict, ...]:
    """The verdict on every case of a plan."""
    return tuple(_judge_case(case, matrix, results) for case in cases)


def _judge_case(case: Case, matrix: Matrix, results: Results) -> Verdict:
    result = results.cases.get(case.id)
    if result is None:
        return Verdict(case=case, passed=False, problems=("the runner reported nothing about it",))
    own = _complete(result, matrix.training.steps)
    if own or case.is_baseline:
        return Verdict(case=case, passed=not own, problems=own, seconds=result.seconds, steps=result.steps)
    baseline = results.cases.get(case.baseline_id)
    if baseline is None or _complete(baseline, matrix.training.steps):
        problem = f"its baseline {case.baseline_id} did not complete, so there is nothing to compare with"
        return Verdict(case=case, passed=False, problems=(problem,), seconds=result.seconds, steps=result.steps)
    return _compare(case, result, baseline, tolerance_of(matrix, case))


def _complete(result: CaseResult, steps: int) -> tuple[str, ...]:
    """Why a result cannot count, whatever its numbers; empty when it can."""
    if result.status != "completed":
        failure = result.failure or {}
        reason = failure.get("message") or "no reason was recorded"
        where = f" (rank {failure['rank']}: {failure.get('log')})" if failure.get("rank") is not None else ""
        return (f"{result.status}: {reason}{where}",)
    if [step.step for step in result.steps] != list(range(1, steps + 1)):
        found = [step.step for step in result.steps]
        return (f"steps 1 to {steps} were expected, found {found}",)
    # Zeros agree with zeros: where nothing is learned, agreement says nothing.
    return tuple(
        f"step {step.step}: {name} is {value}"
        for step in result.steps
        for name, value in (("loss", step.loss), ("grad_norm", step.grad_norm))
        if not math.isfinite(value) or value <= 0
    )


def relative_difference(expected: float, found: float) -> float:
    """``|found - expected| / |expected|``; infinite when only the expected value is zero."""
    if expected == found:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else math.inf


def _compare(case: Case, result: CaseResult, baseline: CaseResult, band: Band) -> Verdict:
    problems: list[str] = []
    largest = {"loss": 0.0, "grad_norm": 0.0}
    for mine, reference in zip(result.steps, baseline.steps, strict=True):
        for name, expected, found, allowed in (
            ("loss", reference.loss, mine.loss, band.loss_relative),
            ("grad_norm", reference.grad_norm, mine.grad_norm, band.grad_norm_relative),
        ):
            difference = relative_difference(expected, found)
            largest[name] = max(largest[name], difference)
            if difference > allowed:
                problems.append(
                    f"step {mine.step}: {name} expected {expected:.8g}, found {found:.8g}: off by {difference:.2e} "
                    f"relative, allowed {allowed:g}"
                )
    return Verdict(
        case=case,
        passed=not problems,
        problems=tuple(problems),
        largest_loss_difference=largest["loss"],
        largest_grad_norm_difference=largest["grad_norm"],
        seconds=result.seconds,
        steps=result.steps,
    )
