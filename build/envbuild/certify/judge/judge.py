"""The judge: a case passes when everything about it agrees with its baseline's, step by step, and only then.

That the job ended, or that the loss fell, is no evidence: a wrong gradient scale and a wrong interleaved pipeline
both train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envbuild.catalog.models import Band, Matrix
from envbuild.certify.cases import Case, same_arithmetic
from envbuild.certify.judge.config_checks import bandwidth_problems, environment_problems, observed_problems
from envbuild.certify.judge.problems import Check, Problem
from envbuild.certify.judge.results import CaseResult, Results, Step, Weights
from envbuild.certify.run.plan import tolerance_of

__all__ = ["CaseResult", "Problem", "Results", "Step", "Verdict", "Weights", "judge", "run_problems"]

# What a failed rank is called, by the kind that the runner states.
_FAILURES: Mapping[str, Check] = {
    "exception": "rank-exception",
    "exit": "rank-exit",
    "signal": "rank-signal",
    "timeout": "timeout",
    "baseline-missing": "baseline",
    "not-finite": "not-finite",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of one repeat of a case: it passed, or why not.

    Attributes:
        largest_weights_difference: None where weights were not to be compared.
        tolerance: what was allowed; None for a baseline.
        reused: from when and which run, where it is an earlier run's verdict.
    """

    case: Case
    passed: bool
    repeat: int = 1
    problems: tuple[Problem, ...] = ()
    largest_loss_difference: float | None = None
    largest_grad_norm_difference: float | None = None
    largest_weights_difference: float | None = None
    tolerance: Band | None = None
    seconds: float | None = None
    devices: tuple[Any, ...] = ()
    steps: tuple[Step, ...] = field(default=())
    observed: Mapping[str, Any] | None = None
    reused: Mapping[str, str] | None = None


def judge(cases: tuple[Case, ...], matrix: Matrix, results: Results, plan: Mapping[str, Any]) -> tuple[Verdict, ...]:
    """The verdict on every repeat of every case of a plan."""
    return _Judge(cases, matrix, results, plan).verdicts()


def run_problems(plan: Mapping[str, Any], results: Results) -> tuple[Problem, ...]:
    """What is wrong with a run as a whole, whatever its cases say."""
    problems = [*environment_problems(plan, results), *bandwidth_problems(plan, results)]
    if results.finished_at is None:
        problems.append(Problem(check="not-reported", text="the runner did not come to its end"))
    return tuple(problems)


class _Judge:
    def __init__(self, cases: tuple[Case, ...], matrix: Matrix, results: Results, plan: Mapping[str, Any]) -> None:
        self._cases = cases
        self._matrix = matrix
        self._results = results
        self._repeats = int(plan.get("repeats", 1))
        self._planned = {case["id"]: case for case in plan["cases"]}
        self._models = plan["models"]
        self._on_cpu = plan["device"] == "cpu"

    def verdicts(self) -> tuple[Verdict, ...]:
        """Case by case; of each case, repeat by repeat."""
        return tuple(self._of(case, repeat) for case in self._cases for repeat in range(1, self._repeats + 1))

    def _of(self, case: Case, repeat: int) -> Verdict:
        result = self._results.of(case.id, repeat)
        verdict = Verdict(case=case, repeat=repeat, passed=False)
        if result is None:
            return _failed(verdict, [Problem(check="not-reported", text="the runner reported nothing about it")])
        verdict = replace(
            verdict,
            seconds=result.seconds,
            devices=result.devices,
            steps=result.steps,
            observed=result.observed,
            tolerance=None if case.is_baseline else tolerance_of(self._matrix, case),
        )
        if problems := self._incomplete(case, result):
            return _failed(verdict, problems)
        baseline = None if case.is_baseline else self._results.of(case.baseline_id, repeat)
        if not case.is_baseline and (baseline is None or self._incomplete(case, baseline)):
            text = f"its baseline {case.baseline_id} did not complete, so there is nothing to compare with"
            return _failed(verdict, [Problem(check="baseline", text=text)])
        planned = self._planned[case.id]
        problems = observed_problems(
            planned, self._models[planned["model"]], result.observed, baseline.observed if baseline else None
        )
        problems += self._repeated(case, result)
        if case.is_baseline and len(result.steps) > 1 and len({step.loss for step in result.steps}) == 1:
            text = f"its loss is {result.steps[0].loss} at every step: nothing was trained"
            problems.append(Problem(check="baseline", text=text))
        if baseline is not None:
            compared = _Compared(case, tolerance_of(self._matrix, case), result.steps, baseline.steps)
            compared.weights(result.weights)
            # What was computed comes first: it is what people look for.
            problems = [*compared.problems, *problems]
            verdict = compared.on(verdict)
        return _failed(verdict, problems) if problems else replace(verdict, passed=True)

    def _incomplete(self, case: Case, result: CaseResult) -> list[Problem]:
        return incomplete(result, self._planned[case.id]["training"]["steps"])

    def _repeated(self, case: Case, result: CaseResult) -> list[Problem]:
        """On the CPU the same processes compute the same digits: what differs was not decided by the plan."""
        first = self._results.of(case.id, 1)
        if not self._on_cpu or result.repeat == 1 or first is None:
            return []
        for mine, other in zip(result.steps, first.steps, strict=False):
            if (mine.loss, mine.grad_norm) != (other.loss, other.grad_norm):
                text = (
                    f"step {mine.step} differs from repeat 1: loss {mine.loss!r}, not {other.loss!r}; grad_norm "
                    f"{mine.grad_norm!r}, not {other.grad_norm!r}"
                )
                return [Problem(check="repeats", text=text)]
        return []


def _failed(verdict: Verdict, problems: list[Problem]) -> Verdict:
    return replace(verdict, passed=False, problems=tuple(problems))


def incomplete(result: CaseResult, steps: int) -> list[Problem]:
    """Why a result cannot count, whatever its numbers; empty when it can."""
    if result.status != "completed":
        return [_failure(result)]
    found = [step.step for step in result.steps]
    if found != list(range(1, steps + 1)):
        return [Problem(check="steps", text=f"steps 1 to {steps} were expected, found {found}")]
    # Zeros agree with zeros: where nothing is learned, agreement says nothing.
    return [
        Problem(check="not-finite", text=f"step {step.step}: {name} is {value}")
        for step in result.steps
        for name, value in (("loss", step.loss), ("grad_norm", step.grad_norm))
        if not math.isfinite(value) or value <= 0
    ]


def _failure(result: CaseResult) -> Problem:
    failure = result.failure or {}
    reason = failure.get("message") or "no reason was recorded"
    where = f" (rank {failure['rank']}: {failure.get('log')})" if failure.get("rank") is not None else ""
    kind = str(failure.get("kind"))
    check: Check = _FAILURES.get(kind, "steps" if kind == "incomplete" and result.steps else "not-reported")
    return Problem(check=check, text=f"{result.status}: {reason}{where}")


def relative_difference(expected: float, found: float) -> float:
    """``|found - expected| / |expected|``; infinite when only the expected value is zero."""
    if expected == found:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else math.inf


def beside(verdict: Verdict, baseline: Verdict) -> Verdict:
    """A verdict of an earlier run beside the verdict on its baseline that it stands with now: compared again.

    Final weights are not there any more: of them counts what was measured.
    """
    if verdict.tolerance is None:
        return verdict
    compared = _Compared(verdict.case, verdict.tolerance, verdict.steps, baseline.steps)
    compared.known_weights(verdict.largest_weights_difference)
    return replace(compared.on(verdict), passed=not compared.problems, problems=tuple(compared.problems))


class _Compared:
    """A case beside its baseline: how far they are from each other, and where that is too far."""

    def __init__(self, case: Case, band: Band, steps: Sequence[Step], baseline: Sequence[Step]) -> None:
        self.problems: list[Problem] = []
        self._case, self._band = case, band
        self._largest = {"loss": 0.0, "grad_norm": 0.0}
        self._weights: float | None = None
        self._steps(steps, baseline)
        if same_arithmetic(case):
            self._bits(steps, baseline)

    def weights(self, weights: Weights | None) -> None:
        """Compare the final weights, where the case says so."""
        if self._case.compare_weights:
            self._compare_weights(self._case.baseline_id, weights)

    def known_weights(self, difference: float | None) -> None:
        """Hold what was measured of the final weights to the band."""
        self._weights = difference
        if self._case.compare_weights:
            self._hold_weights("the worst", math.inf if difference is None else difference)

    def on(self, verdict: Verdict) -> Verdict:
        """The verdict with what was measured."""
        return replace(
            verdict,
            largest_loss_difference=self._largest["loss"],
            largest_grad_norm_difference=self._largest["grad_norm"],
            largest_weights_difference=self._weights,
        )

    def _steps(self, steps: Sequence[Step], baseline: Sequence[Step]) -> None:
        band = self._band
        for mine, reference in zip(steps, baseline, strict=True):
            numbers: tuple[tuple[str, Check, float, float, float], ...] = (
                ("loss", "parity-loss", reference.loss, mine.loss, band.loss_relative),
                ("grad_norm", "parity-grad-norm", reference.grad_norm, mine.grad_norm, band.grad_norm_relative),
            )
            for name, check, expected, found, allowed in numbers:
                difference = relative_difference(expected, found)
                self._largest[name] = max(self._largest[name], difference)
                if difference > allowed:
                    text = (
                        f"step {mine.step}: {name} expected {expected:.8g}, found {found:.8g}: off by "
                        f"{difference:.2e} relative, allowed {allowed:g}"
                    )
                    self.problems.append(Problem(check=check, text=text))

    def _bits(self, steps: Sequence[Step], baseline: Sequence[Step]) -> None:
        for mine, reference in zip(steps, baseline, strict=True):
            if (mine.loss, mine.grad_norm) != (reference.loss, reference.grad_norm):
                text = (
                    f"step {mine.step}: data parallel does the baseline's arithmetic, and differs from it: loss "
                    f"{mine.loss!r}, not {reference.loss!r}; grad_norm {mine.grad_norm!r}, not {reference.grad_norm!r}"
                )
                self.problems.append(Problem(check="data-parallel-bits", text=text))
                return

    def _compare_weights(self, baseline: str, weights: Weights | None) -> None:
        if weights is None or weights.compared_with != baseline or weights.tensors < 1:
            found = "not compared" if weights is None else f"compared with {weights.compared_with}"
            text = f"its final weights were to be compared with those of {baseline}, and were {found}"
            self.problems.append(Problem(check="parity-weights", text=text))
            return
        for names, words in ((weights.missing, "lacks"), (weights.unexpected, "has, and its baseline has not,")):
            if names:
                text = f"its final checkpoint {words} {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
                self.problems.append(Problem(check="parity-weights", text=text))
        self._weights = weights.largest_relative_difference
        self._hold_weights(str(weights.worst), self._weights)

    def _hold_weights(self, worst: str, difference: float) -> None:
        allowed = self._band.weights_relative
        if not difference <= allowed:  # NaN is no agreement
            text = f"final weights: {worst} is off by {difference:.2e} relative, allowed {allowed:g}"
            self.problems.append(Problem(check="parity-weights", text=text))
        if difference and same_arithmetic(self._case):
            text = f"the final weights differ from the baseline's by {difference:.2e}, and must not"
            self.problems.append(Problem(check="data-parallel-bits", text=text))
