"""Verdicts in the form in which certificates, reports and ``--json`` show them."""

from __future__ import annotations

from envbuild.catalog.models import Matrix
from envbuild.certify.certificate.statement import CaseVerdict, Numbers, Problem, Reused, Step, finite
from envbuild.certify.judge.judge import Verdict
from envbuild.core.digests import Json


def case_verdict(verdict: Verdict) -> CaseVerdict:
    """A verdict with its numbers; None for what is not finite."""
    band = verdict.tolerance
    return CaseVerdict(
        id=verdict.case.id,
        baseline=None if verdict.case.is_baseline else verdict.case.baseline_id,
        repeat=verdict.repeat,
        passed=verdict.passed,
        problems=tuple(Problem(check=problem.check, text=problem.text) for problem in verdict.problems),
        largest_relative_difference=Numbers(
            loss=finite(verdict.largest_loss_difference),
            grad_norm=finite(verdict.largest_grad_norm_difference),
            weights=finite(verdict.largest_weights_difference),
        ),
        tolerance=Numbers()
        if band is None
        else Numbers(loss=band.loss_relative, grad_norm=band.grad_norm_relative, weights=band.weights_relative),
        seconds=verdict.seconds,
        devices=verdict.devices,
        steps=tuple(
            Step(step=step.step, loss=finite(step.loss), grad_norm=finite(step.grad_norm), seconds=step.seconds)
            for step in verdict.steps
        ),
        observed=dict(verdict.observed) if verdict.observed is not None else None,
        reused=Reused.model_validate(verdict.reused) if verdict.reused else None,
    )


def verdict_json(verdict: Verdict) -> dict[str, Json]:
    """The same as a JSON value."""
    found: dict[str, Json] = case_verdict(verdict).model_dump(mode="json", by_alias=True)
    return found


def tolerances_json(matrix: Matrix) -> dict[str, Json]:
    """The tolerances of a matrix, by precision."""
    return {
        precision.value: band.model_dump(mode="json", exclude_none=True) for precision, band in matrix.tolerance.items()
    }
