"""The certificate: an in-toto Statement about an image, for now without a signature, and it says so.

Format: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md

Its seal is the digest of the whole statement but the seal itself. It finds a certificate that was edited or damaged;
whoever wants to deceive can write a seal too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, ValidationError

from envbuild import __version__
from envbuild.catalog.models import Matrix, Model, Precision, Tolerance
from envbuild.certify.judge import Results, Verdict
from envbuild.certify.plan import JUDGE_VERSION, Subject
from envbuild.core.digests import Json, digest_of
from envbuild.core.errors import CheckRefusedError

STATEMENT_TYPE: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Literal["urn:envbuild:certificate:1"] = "urn:envbuild:certificate:1"
UNSIGNED = "This statement is not signed: it says what was measured, and proves nothing about who measured it."


class Sha256(Model):
    """A digest as in-toto writes it: hex digits under the algorithm's name."""

    sha256: str


class CertifiedFile(Model):
    """A subject of the statement."""

    name: str
    digest: Sha256


class Differences(Model):
    """How far a case was from its baseline at most, relative to it; None for a baseline."""

    loss: float | None
    grad_norm: float | None


class CertifiedStep(Model):
    """What one training step measured."""

    step: int
    loss: float
    grad_norm: float


class CertifiedCase(Model):
    """A case with its numbers."""

    id: str
    baseline: str | None
    passed: bool
    problems: tuple[str, ...]
    largest_relative_difference: Differences
    seconds: float
    steps: tuple[CertifiedStep, ...] = Field(min_length=1)


class SmokeRunner(Model):
    """What ran inside the image."""

    version: str
    digest: str


class Predicate(Model):
    """What is said of the subjects."""

    key: str = Field(description="the digest of everything that decides the verdict")
    verdict: Literal["passed"]
    signed: Literal[False]
    note: str
    stack: str
    base: str
    target: str
    lock_digest: str
    lock_is_current: bool = Field(description="made from the stack and the base as they were at issued_at")
    matrix: str
    whole_matrix: bool
    tolerance: dict[Precision, Tolerance]
    plan_digest: str
    envbuild: str
    judge: int
    smoke: SmokeRunner
    runtime: str = Field(description="how the .sqsh was opened")
    environment: dict[str, JsonValue]
    started_at: str
    finished_at: str
    issued_at: str
    cases: tuple[CertifiedCase, ...] = Field(min_length=1)
    seal: str = Field(description="digest of everything else in the statement: it is not edited by hand")


class Certificate(Model):
    """A certificate that was read."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: tuple[CertifiedFile, ...]
    predicate_type: Literal["urn:envbuild:certificate:1"] = Field(alias="predicateType")
    predicate: Predicate

    def cases_json(self) -> list[Json]:
        """The cases as they stand in it."""
        return [case.model_dump(mode="json") for case in self.predicate.cases]

    def mismatch(self, *, subject: Subject, key: str, case_ids: Sequence[str]) -> str:
        """Why it is not the certificate of a subject, key and cases, in words; empty when it is."""
        stated = {item.name: item.digest.sha256 for item in self.subject}
        found = [case.id for case in self.predicate.cases]
        if self.predicate.key != key:
            return f"it is of key {self.predicate.key}"
        if stated != _subject_digests(subject) or len(stated) != len(self.subject):
            return f"it is about {', '.join(f'{name} {digest}' for name, digest in stated.items())}"
        if found != list(case_ids):
            return f"its cases are {', '.join(found)}"
        failed = [case.id for case in self.predicate.cases if not case.passed or case.problems]
        return f"by its own words {failed[0]} did not pass" if failed else ""


def read_certificate(path: Path) -> Certificate:
    """Read a certificate and check it against its seal.

    Raises:
        CheckRefusedError: it was edited, is damaged, or was written by another version of envbuild.
    """

    def refuse(why: str) -> CheckRefusedError:
        return CheckRefusedError(
            f"the certificate {path} is not as it was written",
            why=why,
            fix="Run `envbuild certify` again: it makes a new one.",
        )

    try:
        raw = json.loads(path.read_bytes(), object_pairs_hook=_each_key_once)
        certificate = Certificate.model_validate(raw)
        expected = _seal(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise refuse(f"{'.'.join(map(str, first['loc'])) or 'the statement'}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise refuse(str(error)) from error
    if certificate.predicate.seal != expected:
        raise refuse(f"its seal is {certificate.predicate.seal}, its content has {expected}")
    return certificate


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; what stands twice is read in one way here and in another way there."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _seal(statement: dict[str, Any]) -> str:
    predicate = {key: value for key, value in statement["predicate"].items() if key != "seal"}
    return digest_of({**statement, "predicate": predicate})


def _subject_digests(subject: Subject) -> dict[str, str]:
    """The hex digest of each subject by its name."""
    digests = {"oci": subject.oci_digest, "sqsh": subject.sqsh_digest}
    return {f"{subject.name}.{kind}": digest.removeprefix("sha256:") for kind, digest in digests.items() if digest}


def make_certificate(
    *,
    subject: Subject,
    key: str,
    lock_is_current: bool,
    matrix_name: str,
    matrix: Matrix,
    whole_matrix: bool,
    plan_digest: str,
    smoke_digest: str,
    runtime: str,
    results: Results,
    verdicts: tuple[Verdict, ...],
) -> dict[str, Json]:
    """The sealed statement as a JSON value; made only when every case passed."""
    tolerances: dict[str, Json] = {
        precision.value: band.model_dump(mode="json") for precision, band in matrix.tolerance.items()
    }
    subjects: list[Json] = [
        {"name": name, "digest": {"sha256": digest}} for name, digest in _subject_digests(subject).items()
    ]
    predicate: dict[str, Json] = {
        "key": key,
        "verdict": "passed",
        "signed": False,
        "note": UNSIGNED,
        "stack": subject.stack,
        "base": subject.base,
        "target": subject.target,
        "lock_digest": subject.lock_digest,
        "lock_is_current": lock_is_current,
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
    }
    statement: dict[str, Json] = {
        "_type": STATEMENT_TYPE,
        "subject": subjects,
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }
    predicate["seal"] = _seal(statement)
    return statement


def verdict_json(verdict: Verdict) -> dict[str, Json]:
    """A verdict with its numbers, as it stands in certificates and in ``--json``; None for what is not finite."""
    return {
        "id": verdict.case.id,
        "baseline": None if verdict.case.is_baseline else verdict.case.baseline_id,
        "passed": verdict.passed,
        "problems": list(verdict.problems),
        "largest_relative_difference": {
            "loss": _finite(verdict.largest_loss_difference),
            "grad_norm": _finite(verdict.largest_grad_norm_difference),
        },
        "seconds": verdict.seconds,
        "steps": [
            {"step": step.step, "loss": _finite(step.loss), "grad_norm": _finite(step.grad_norm)}
            for step in verdict.steps
        ],
    }


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
