"""``plan.json``: all that the smoke runner is told. Its schema lives with smoke."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from envbuild.catalog.models import Device, Driver, Matrix, Tolerance
from envbuild.certify.cases import Case
from envbuild.core.digests import Json, digest_of

PLAN_SCHEMA = "envbuild.plan/1"
# Raised when the judge would come to another verdict about the same results.
JUDGE_VERSION = 1
# The drivers that the smoke runner has.
DRIVERS = (Driver.MCORE,)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a certificate is about: names, and the digests of the lock and the image.

    Attributes:
        name: what the image is called where it was put; no part of what is certified.
    """

    name: str
    stack: str
    base: str
    target: str
    lock_digest: str
    oci_digest: str
    sqsh_digest: str

    def as_json(self) -> dict[str, Json]:
        return {
            "stack": self.stack,
            "base": self.base,
            "target": self.target,
            "lock_digest": self.lock_digest,
            "oci_digest": self.oci_digest,
            "sqsh_digest": self.sqsh_digest,
        }


def tolerance_of(matrix: Matrix, case: Case) -> Tolerance:
    """How far a case may be from its baseline."""
    return matrix.tolerance[case.precision]


def make_plan(
    *,
    subject: Subject,
    device: Device,
    driver: Driver,
    matrix: Matrix,
    cases: tuple[Case, ...],
    expected_versions: dict[str, str],
) -> dict[str, Json]:
    """The plan as a JSON value, with a fresh nonce."""
    used = {case.model for case in cases}
    models: dict[str, Json] = {
        name: model.model_dump(mode="json") for name, model in matrix.models.items() if name in used
    }
    return {
        "schema": PLAN_SCHEMA,
        "nonce": secrets.token_hex(16),
        "subject": subject.as_json(),
        "device": device.value,
        "expected_versions": dict(expected_versions),
        "models": models,
        "cases": [_case_json(case, matrix, driver) for case in cases],
    }


def _case_json(case: Case, matrix: Matrix, driver: Driver) -> Json:
    return {
        "id": case.id,
        "baseline": None if case.is_baseline else case.baseline_id,
        "driver": driver.value,
        "model": case.model,
        "precision": case.precision.value,
        "layout": {
            "data": case.layout.data,
            "tensor": case.layout.tensor,
            "pipeline": case.layout.pipeline,
            "virtual_pipeline": case.layout.virtual_pipeline,
            "context": 1,
            "expert": 1,
            "sequence": False,
        },
        "world_size": case.layout.world_size,
        "training": matrix.training.model_dump(mode="json"),
        "settings": {"overlap_p2p_comm": case.overlap_p2p_comm, "batch_p2p_comm": not case.overlap_p2p_comm},
        "time_limit_seconds": matrix.time_limit_seconds,
    }


def certification_key(plan: dict[str, Json], matrix: Matrix, smoke_digest: str, *, scope: str) -> str:
    """The digest of all that decides a certificate: the plan without its nonce, tolerances, smoke, judge.

    Args:
        scope: the matrix's name, or that it is a part of it.
    """
    tolerances: dict[str, Json] = {
        precision.value: band.model_dump(mode="json") for precision, band in matrix.tolerance.items()
    }
    return digest_of(
        {
            "scope": scope,
            "plan": {key: value for key, value in plan.items() if key != "nonce"},
            "tolerance": tolerances,
            "smoke": smoke_digest,
            "judge": JUDGE_VERSION,
        }
    )
