"""The judge: a case passes only if everything about it agrees with its baseline's, step by step.

A job can exit 0 with a falling loss and still be wrong: a wrong gradient scale and a wrong interleaved pipeline both
train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import JsonValue

from envbuild.catalog.matrix import Matrix
from envbuild.certify.cases.case import Case, same_arithmetic, same_gradients
from envbuild.certify.judge.bands import Bands, GradientBands, compare_gradients, spread_of
from envbuild.certify.judge.config_checks import environment_problems, hardware_problems, observed_problems
from envbuild.certify.judge.network import network_problems
from envbuild.certify.judge.nodes import node_problems
from envbuild.certify.judge.numbers import off_by, relative_difference
from envbuild.certify.judge.reference import compare_reference
from envbuild.certify.judge.results import Results
from envbuild.certify.judge.slow_nodes import slow_node_problems
from envbuild.certify.models import CaseVerdict, Check, Numbers, Problem
from envbuild_smoke.plan.json_reader import as_json
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.results import CaseLine, Observed, Step, Weights

# Raised when the judge would come to another verdict about the same results.
JUDGE_VERSION = 15
# The check that a failed rank fails, by the kind of failure that the runner reports.
_FAILURES: Mapping[str, Check] = {
    "exception": "rank-exception",
    "exit": "rank-exit",
    "terminated": "rank-signal",
    "node-lost": "nodes",
    "signal": "rank-signal",
    "timeout": "timeout",
    "baseline-missing": "baseline",
    "not-finite": "not-finite",
}
# The check of each number of a step.
# Both are compared, for the loss alone hides wrong gradients: a loss averaged wrongly over two context-parallel ranks
# differed by at most 0.3%, with a grad norm of 6.71 for 3.40 (two H200, megatron-core 0.16.1, 8 steps).
_PARITY: Mapping[str, Check] = {"loss": "parity-loss", "grad_norm": "parity-grad-norm"}


def judge(cases: tuple[Case, ...], matrix: Matrix, results: Results, plan: Plan) -> tuple[CaseVerdict, ...]:
    """The verdict on every repeat of every case of a plan."""
    return _Judge(cases, matrix, results, plan).verdicts()


def run_problems(plan: Plan, results: Results) -> tuple[Problem, ...]:
    """The problems of a run as a whole, whatever its cases measured."""
    return (
        *environment_problems(plan, results),
        *node_problems(plan, results),
        *slow_node_problems(plan, results),
        *network_problems(plan, results),
        *hardware_problems(plan, results),
    )


class _Judge:
    def __init__(self, cases: tuple[Case, ...], matrix: Matrix, results: Results, plan: Plan) -> None:
        self._cases = cases
        self._matrix = matrix
        self._results = results
        self._plan = plan
        # By case and repeat: they are the same for all cases of a baseline.
        self._bands: dict[tuple[str, int], GradientBands] = {}

    def verdicts(self) -> tuple[CaseVerdict, ...]:
        """Case by case; of each case, repeat by repeat."""
        repeats = {case.id: self._plan.runs_of(self._plan.case(case.id)) for case in self._cases}
        return tuple(self._verdict(case, repeat) for case in self._cases for repeat in repeats[case.id])

    def _verdict(self, case: Case, repeat: int) -> CaseVerdict:
        result = self._results.case(case.id, repeat)
        verdict = CaseVerdict(
            id=case.id,
            baseline=case.compared_with,
            repeat=repeat,
            passed=False,
            problems=(),
            largest_relative_difference=Numbers(),
            seconds=None,
            steps=(),
        )
        if result is None:
            return _judged(verdict, [Problem(check="not-reported", text="the runner reported nothing about it")])
        measured = {
            "seconds": result.seconds,
            "devices": result.devices,
            "nodes": result.nodes,
            "steps": result.steps,
            "observed": _as_json(result.observed),
        }
        verdict = verdict.model_copy(update=measured)
        if problems := self._incomplete(case, result):
            return _judged(verdict, problems)
        if case.is_baseline:
            planned = self._plan.run_of(self._plan.case(case.id), repeat)
            reference, problems = compare_reference(planned, self._plan.models[case.model], result)
            problems += [*self._configuration(case, result, None), *self._repeated(case, result)]
            spread = spread_of(result, planned.perturbed_runs)
            if spread is not None:
                spread = spread.model_copy(update={"caught": self._gradient_bands(result).caught})
            elif planned.perturbed_runs:
                text = "it was to be trained again with its weights moved, and the runner did not report that whole"
                problems.append(Problem(check="baseline", text=text))
            verdict = verdict.model_copy(update={"reference": reference, "spread": spread})
            return _judged(verdict, [*problems, *_untrained(verdict.steps)])
        baseline = self._results.case(case.baseline_id, repeat)
        if baseline is None or self._incomplete(case, baseline):
            text = f"its baseline {case.baseline_id} did not complete, so there is nothing to compare with"
            return _judged(verdict, [Problem(check="baseline", text=text)])
        planned = self._plan.case(case.baseline_id)
        measured_by = self._results.measuring(planned, repeat, self._plan)
        spread = None if measured_by is None else spread_of(measured_by, planned.perturbed_runs)
        if measured_by is None or spread is None:
            text = f"of its baseline {case.baseline_id} it was not measured what moved weights do to it: no bands"
            return _judged(verdict, [Problem(check="baseline", text=text)])
        bands = Bands(spread, self._matrix.tolerance[case.precision])
        driver = self._plan.case(case.id).driver
        comparison = _Comparison(case, bands, result.steps, baseline.steps, same_digits=same_arithmetic(case, driver))
        comparison.compare_weights(result.weights)
        sums = same_gradients(case, driver)
        of_gradients = GradientBands.of_sums(baseline) if sums else self._gradient_bands(measured_by)
        worst, gradients = compare_gradients(result, baseline, of_gradients)
        # What was computed comes first: it is what people look for.
        problems = [
            *comparison.problems,
            *gradients,
            *self._configuration(case, result, baseline),
            *self._repeated(case, result),
        ]
        compared = {"largest_relative_difference": comparison.largest(), "tolerance": bands.widest()}
        if worst is not None:
            measured_gradient = worst.measured if math.isfinite(worst.measured) else None
            compared = _with_gradients(compared, measured_gradient, worst.allowed)
        return _judged(verdict.model_copy(update=compared), problems)

    def _configuration(self, case: Case, result: CaseLine, baseline: CaseLine | None) -> list[Problem]:
        of_baseline = baseline.observed if baseline else None
        return observed_problems(self._plan.case(case.id), self._plan.models[case.model], result.observed, of_baseline)

    def _gradient_bands(self, baseline: CaseLine) -> GradientBands:
        key = (baseline.case, baseline.repeat)
        if key not in self._bands:
            self._bands[key] = GradientBands.measured(baseline)
        return self._bands[key]

    def _incomplete(self, case: Case, result: CaseLine) -> list[Problem]:
        problems = incomplete(result, self._plan.case(case.id).training.steps)
        node = result.failure.node if result.failure is not None else None
        if node is None or self._plan.nodes == 1:
            return problems
        name = self._results.name_of(node)
        return [Problem(check=problem.check, text=f"{problem.text} on {name}") for problem in problems]

    def _repeated(self, case: Case, result: CaseLine) -> list[Problem]:
        """On the CPU the same processes compute the same digits; a difference is not the plan's."""
        # The first on the same nodes: other processors may round otherwise.
        repeat = (result.repeat - 1) % self._plan.nodes + 1
        first = self._results.case(case.id, repeat)
        if self._plan.device != "cpu" or result.repeat == repeat or first is None:
            return []
        # Not strict: repeat 1 may have failed before its last step.
        for mine, other in zip(result.steps, first.steps, strict=False):
            if (mine.loss, mine.grad_norm) != (other.loss, other.grad_norm):
                text = (
                    f"step {mine.step} differs from repeat {repeat}: loss {mine.loss!r}, not {other.loss!r}; grad_norm "
                    f"{mine.grad_norm!r}, not {other.grad_norm!r}"
                )
                return [Problem(check="repeats", text=text)]
        return []


def _as_json(observed: Observed | None) -> dict[str, JsonValue] | None:
    """As certificates have it: without what its driver does not report."""
    if observed is None:
        return None
    values = cast("dict[str, JsonValue]", as_json(observed))
    return {name: value for name, value in values.items() if value not in (None, [])}


def _judged(verdict: CaseVerdict, problems: Sequence[Problem]) -> CaseVerdict:
    return verdict.model_copy(update={"passed": not problems, "problems": tuple(problems)})


def _untrained(steps: Sequence[Step]) -> list[Problem]:
    """That the loss of a baseline never changed."""
    # Such a baseline would agree with every layout that learns nothing either.
    if len(steps) < 2 or len({step.loss for step in steps}) > 1:
        return []
    return [Problem(check="baseline", text=f"its loss is {steps[0].loss} at every step: nothing was trained")]


def _with_gradients(
    numbers: Mapping[str, Numbers], measured: float | None, allowed: float | None
) -> dict[str, Numbers]:
    given = {"largest_relative_difference": measured, "tolerance": allowed}
    return {key: numbers[key].model_copy(update={"gradients": value}) for key, value in given.items()}


def incomplete(result: CaseLine, steps: int) -> list[Problem]:
    """Why a result cannot count, whatever its numbers; empty when it can."""
    if result.status != "completed":
        return [_failure(result)]
    reported = [step.step for step in result.steps]
    if reported != list(range(1, steps + 1)):
        return [Problem(check="steps", text=f"steps 1 to {steps} were expected, found {reported}")]
    # Zeros agree with zeros: where nothing is learned, agreement proves nothing.
    return [
        Problem(check="not-finite", text=f"step {step.step}: {name} is {'not finite' if value is None else value}")
        for step in result.steps
        for name, value in (("loss", step.loss), ("grad_norm", step.grad_norm))
        if value is None or value <= 0
    ]


def _failure(result: CaseLine) -> Problem:
    failure = result.failure
    if failure is None:
        return Problem(check="not-reported", text=f"{result.status}: no reason was recorded")
    where = f" (rank {failure.rank}: {failure.log})" if failure.rank is not None else ""
    # A rank that exits with 0 before its first step has reported nothing.
    check: Check = _FAILURES.get(
        failure.kind, "steps" if failure.kind == "incomplete" and result.steps else "not-reported"
    )
    return Problem(check=check, text=f"{result.status}: {failure.message or 'no reason was recorded'}{where}")


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _first_of(name: str, off: Sequence[tuple[int, float, str]], steps: int) -> str:
    """The first step that is off, and how many more there are: later ones follow from it."""
    step, _, numbers = off[0]
    text = f"step {step}: {name} {numbers}"
    if len(off) == 1:
        return text
    worst, difference, _ = max(off, key=lambda entry: math.inf if math.isnan(entry[1]) else entry[1])
    return f"{text}; {len(off)} of {steps} steps are off, step {worst} the most, by {difference:.2e}"


class _Comparison:
    """A case and its baseline, both complete: how far they are from each other, and where that is too far."""

    def __init__(
        self, case: Case, bands: Bands, steps: Sequence[Step], baseline: Sequence[Step], *, same_digits: bool
    ) -> None:
        self.problems: list[Problem] = []
        self._case, self._bands, self._same_digits = case, bands, same_digits
        self._largest = {"loss": 0.0, "grad_norm": 0.0}
        self._weights: float | None = None
        self._compare_steps(steps, baseline)
        if same_digits:
            self._compare_bits(steps, baseline)

    def largest(self) -> Numbers:
        """The largest relative differences."""
        weights = self._weights
        # JSON has no infinity: such a number is left out, and its problem states it.
        numbers = {**self._largest, "weights": math.inf if weights is None else weights}
        return Numbers(**{name: value for name, value in numbers.items() if math.isfinite(value)})

    def _compare_steps(self, steps: Sequence[Step], baseline: Sequence[Step]) -> None:
        for name, check in _PARITY.items():
            off: list[tuple[int, float, str]] = []
            for index, (mine, reference) in enumerate(zip(steps, baseline, strict=True)):
                expected, actual = (_number(getattr(step, name)) for step in (reference, mine))
                limit = self._bands.of_step(name, index)
                difference = relative_difference(expected, actual)
                self._largest[name] = max(self._largest[name], difference)
                if not difference <= limit:  # also where it is NaN
                    limited = self._bands.limited(name, index)
                    off.append((mine.step, difference, f"{off_by(expected, actual, limit)}{limited}"))
            if off:
                self.problems.append(Problem(check=check, text=_first_of(name, off, len(steps))))

    def _compare_bits(self, steps: Sequence[Step], baseline: Sequence[Step]) -> None:
        for mine, reference in zip(steps, baseline, strict=True):
            if (mine.loss, mine.grad_norm) != (reference.loss, reference.grad_norm):
                text = (
                    f"step {mine.step}: data parallel does the baseline's arithmetic, and differs from it: loss "
                    f"{mine.loss!r}, not {reference.loss!r}; grad_norm {mine.grad_norm!r}, not {reference.grad_norm!r}"
                )
                self.problems.append(Problem(check="data-parallel-bits", text=text))
                return

    def compare_weights(self, weights: Weights | None) -> None:
        """Check the comparison of the final weights, where the case asks for one."""
        if not self._case.compare_weights:
            return
        baseline = self._case.baseline_id
        if weights is None or weights.compared_with != baseline or weights.tensors < 1:
            state = "not compared" if weights is None else f"compared with {weights.compared_with}"
            text = f"its final weights were to be compared with those of {baseline}, and were {state}"
            self.problems.append(Problem(check="parity-weights", text=text))
            return
        for names, words in ((weights.missing, "lacks"), (weights.unexpected, "has, and its baseline has not,")):
            if names:
                text = f"its final checkpoint {words} {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
                self.problems.append(Problem(check="parity-weights", text=text))
        self._weights = _number(weights.largest_relative_difference)
        self._check_weights(str(weights.worst), self._weights)

    def _check_weights(self, worst: str, difference: float) -> None:
        allowed = self._bands.weights
        if not difference <= allowed:  # also where it is NaN
            text = f"final weights: {worst} is off by {difference:.2e} relative, allowed {allowed:.2g}"
            text += self._bands.limited("weights")
            self.problems.append(Problem(check="parity-weights", text=text))
        if difference and self._same_digits:
            text = f"the final weights differ from the baseline's by {difference:.2e}, and must not"
            self.problems.append(Problem(check="data-parallel-bits", text=text))
