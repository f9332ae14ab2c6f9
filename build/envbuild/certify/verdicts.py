"""Verdicts in the form in which certificates, reports and ``--json`` show them."""

from __future__ import annotations

from envbuild.certify.certificates.statement import CaseVerdict, Numbers, Problem, Step, finite
from envbuild.certify.judge import Verdict
from envbuild.core.digests import Json


def case_verdict(verdict: Verdict) -> CaseVerdict:
    """A verdict with its numbers; None for what is not finite."""
    return CaseVerdict(
        id=verdict.case.id,
        baseline=None if verdict.case.is_baseline else verdict.case.baseline_id,
        passed=verdict.passed,
        problems=tuple(Problem(check="judge", text=text) for text in verdict.problems),
        largest_relative_difference=Numbers(
            loss=finite(verdict.largest_loss_difference), grad_norm=finite(verdict.largest_grad_norm_difference)
        ),
        seconds=verdict.seconds,
        steps=tuple(
            Step(step=step.step, loss=finite(step.loss), grad_norm=finite(step.grad_norm), seconds=step.seconds)
            for step in verdict.steps
        ),
    )


def verdict_json(verdict: Verdict) -> dict[str, Json]:
    """The same as a JSON value."""
    found: dict[str, Json] = case_verdict(verdict).model_dump(mode="json", by_alias=True)
    return found
