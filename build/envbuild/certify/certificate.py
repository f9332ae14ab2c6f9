"""The certificate: an in-toto Statement about an image, for now without a signature, and it says so.

Format: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
"""

from __future__ import annotations

from datetime import datetime, timezone

from envbuild import __version__
from envbuild.catalog.models import Matrix
from envbuild.certify.judge import Results, Verdict
from envbuild.certify.plan import JUDGE_VERSION, Subject
from envbuild.core.digests import Json

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:envbuild:certificate:1"
UNSIGNED = "This statement is not signed: it says what was measured, and proves nothing about who measured it."


def make_certificate(
    *,
    subject: Subject,
    key: str,
    matrix_name: str,
    matrix: Matrix,
    whole_matrix: bool,
    plan_digest: str,
    smoke_digest: str,
    runtime: str,
    results: Results,
    verdicts: tuple[Verdict, ...],
) -> dict[str, Json]:
    """The statement as a JSON value; made only when every case passed."""
    name = f"{subject.stack}-{subject.base}-{subject.target}"
    tolerances: dict[str, Json] = {
        precision.value: band.model_dump(mode="json") for precision, band in matrix.tolerance.items()
    }
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": f"{name}.oci", "digest": {"sha256": subject.oci_digest.removeprefix("sha256:")}},
            {"name": f"{name}.sqsh", "digest": {"sha256": subject.sqsh_digest.removeprefix("sha256:")}},
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "key": key,
            "verdict": "passed",
            "signed": False,
            "note": UNSIGNED,
            "stack": subject.stack,
            "base": subject.base,
            "target": subject.target,
            "lock_digest": subject.lock_digest,
            "matrix": matrix_name,
            "whole_matrix": whole_matrix,
            "tolerance": tolerances,
            "plan_digest": plan_digest,
            "envbuild": __version__,
            "judge": JUDGE_VERSION,
            "smoke": {"version": results.smoke_version, "digest": smoke_digest},
            "runtime": runtime,
            "environment": dict(results.environment),
            "started_at": results.started_at,
            "finished_at": results.finished_at or "",
            "issued_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "cases": [verdict_json(verdict) for verdict in verdicts],
        },
    }


def verdict_json(verdict: Verdict) -> dict[str, Json]:
    """A verdict with its numbers, as it stands in certificates and in ``--json``."""
    return {
        "id": verdict.case.id,
        "baseline": None if verdict.case.is_baseline else verdict.case.baseline_id,
        "passed": verdict.passed,
        "problems": list(verdict.problems),
        "largest_relative_difference": {
            "loss": verdict.largest_loss_difference,
            "grad_norm": verdict.largest_grad_norm_difference,
        },
        "seconds": verdict.seconds,
        "steps": [{"step": step.step, "loss": step.loss, "grad_norm": step.grad_norm} for step in verdict.steps],
    }
