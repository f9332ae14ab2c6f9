"""Verdicts of earlier runs: a case that passed is not run again while nothing that decides it changed.

Only an image is known by its content. An environment on this machine may have changed since, so its cases train every
time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from pydantic import ValidationError

from envbuild.catalog.matrix import Matrix
from envbuild.certify.cases.case import Case
from envbuild.certify.cases.selection import with_baselines
from envbuild.certify.certificate.statement import Measured, is_after
from envbuild.certify.judge.judge import JUDGE_VERSION, compare_again
from envbuild.certify.judge.results import Results
from envbuild.certify.models import CaseVerdict, Reused
from envbuild.certify.run.job import CertifyJob
from envbuild.certify.run.plan import computed
from envbuild.core.digests import Json, digest_of
from envbuild.launch.gpus import Gpu
from envbuild.store import entry_index
from envbuild.store.local import LocalStore

KIND, FILE = "verdicts", "verdict.json"
PREFIX = "NCCL_"
# They change what NCCL logs, not what it does.
LOGGING = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")


@dataclass(frozen=True, kw_only=True)
class MachineKey:
    """The part of a machine that decides a verdict: models of GPUs, drivers, NCCL's settings, and the runtime."""

    runtime: str
    gpus: tuple[str, ...]
    drivers: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]

    @classmethod
    def here(cls, runtime: str, gpus: Iterable[Gpu], variables: Mapping[str, str]) -> MachineKey:
        """The machine that runs envbuild, as the cases will find it."""
        return cls._made(runtime, [(gpu.name, gpu.driver) for gpu in gpus], variables)

    @classmethod
    def of(cls, runtime: str, results: Results) -> MachineKey:
        """The machine that results are from."""
        gpus = [(gpu.name, gpu.driver) for gpu in results.run.machine.gpus]
        return cls._made(runtime, gpus, results.run.machine.variables)

    @classmethod
    def _made(cls, runtime: str, gpus: Sequence[tuple[str, str]], variables: Mapping[str, str]) -> MachineKey:
        """The key of GPUs, each with its driver, and of the variables that NCCL reads."""
        settings = (item for item in variables.items() if item[0].startswith(PREFIX) and item[0] not in LOGGING)
        return cls(
            runtime=runtime,
            # Their number is no part of it: the case in the key has its world size.
            gpus=tuple(sorted({name for name, _ in gpus})),
            drivers=tuple(sorted({driver for _, driver in gpus})),
            variables=tuple(sorted(settings)),
        )


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a verdict rests on: the plan that was run, where, and what the run measured next to its cases."""

    runtime: str
    measured: Measured
    plan_digest: str
    nonce: str


@dataclass(frozen=True, kw_only=True)
class KeptVerdict:
    """A verdict of an earlier run, and what it rests on."""

    verdict: CaseVerdict
    evidence: Evidence


def find(job: CertifyJob, machine: MachineKey, store: LocalStore) -> dict[str, KeptVerdict]:
    """The verdicts that need no run, by case; each agrees with that on its baseline.

    A baseline is among them only where nothing that needs its weights has to run.
    """
    # A verdict that is kept is of one repeat alone.
    if not job.certifies_image or job.request.repeats > 1:
        return {}
    found = {case.id: kept for case in job.cases if (kept := _read(job, case, machine, store)) is not None}
    found = {
        case.id: found[case.id]
        for case in job.cases
        if case.id in found and _agrees(case, found[case.id].verdict, found, job.matrix)
    }
    # A case starts from its baseline's weights, which the earlier run has removed: its baseline trains again with it.
    missing = [case.id for case in job.cases if case.id not in found]
    for case in with_baselines(job.cases, missing):
        found.pop(case.id, None)
    return found


def _agrees(case: Case, verdict: CaseVerdict, found: Mapping[str, KeptVerdict], matrix: Matrix) -> bool:
    """Whether a verdict follows from its numbers and its baseline's; True where the baseline will be run."""
    baseline = None if case.is_baseline else found.get(case.baseline_id)
    return baseline is None or compare_again(case, verdict, baseline.verdict, matrix) == verdict


def keep(
    job: CertifyJob, verdicts: Sequence[CaseVerdict], evidence: Evidence, machine: MachineKey, store: LocalStore
) -> None:
    """Keep the verdicts of a run in which everything passed."""
    if not job.certifies_image or not store.is_writable:
        return
    cases = {case.id: case for case in job.cases}
    for verdict in verdicts:
        if verdict.reused or not verdict.passed or verdict.repeat > 1:
            continue
        content = {
            "schema": "envbuild.verdict/1",
            "case": verdict.model_dump(mode="json", by_alias=True),
            "measured": evidence.measured.model_dump(mode="json", by_alias=True),
            "plan_digest": evidence.plan_digest,
            "nonce": evidence.nonce,
        }
        store.rebuild(KIND, key_of(job, cases[verdict.id], machine), entry_index.json_writer(FILE, content))


def forget(job: CertifyJob, cases: Iterable[Case], machine: MachineKey, store: LocalStore) -> None:
    """Remove the verdicts on cases that did not pass now: what was measured last counts."""
    if job.certifies_image and store.is_writable:
        for case in cases:
            store.remove(KIND, key_of(job, case, machine))


def key_of(job: CertifyJob, case: Case, machine: MachineKey) -> str:
    """The digest of everything that decides the verdict on a case."""
    baseline: Json = None if case.is_baseline else computed(job.planned(case.baseline_id))
    models: Any = job.plan["models"]
    return digest_of(
        {
            "subject": job.plan["subject"],
            "device": job.plan["device"],
            "gpu": job.plan["gpu"],
            "case": computed(job.planned(case.id)),
            "baseline": baseline,
            "model": models[case.model],
            "tolerance": job.matrix.tolerance[case.precision].model_dump(mode="json"),
            "smoke": job.smoke_digest,
            "judge": JUDGE_VERSION,
            "runtime": machine.runtime,
            "gpus": machine.gpus,
            "drivers": machine.drivers,
            "variables": dict(machine.variables),
        }
    )


def _read(job: CertifyJob, case: Case, machine: MachineKey, store: LocalStore) -> KeptVerdict | None:
    path = store.find(KIND, key_of(job, case, machine))
    if path is None:
        return None
    try:
        content = entry_index.read_json(path, FILE)
        stored = CaseVerdict.model_validate_json(json.dumps(content["case"]), strict=True)
        measured = Measured.model_validate_json(json.dumps(content["measured"]), strict=True)
        plan_digest, nonce = str(content["plan_digest"]), str(content["nonce"])
    except (ValueError, KeyError, TypeError, ValidationError):
        return None  # damaged, or of another version of envbuild: it is run again
    # Whoever can write to the store can write an entry's index too: its content is checked as well.
    if not _is_of(case, stored) or not _is_of_job(job, measured):
        return None
    reused = Reused.model_validate({"from": measured.finished_at, "run": plan_digest})
    verdict = stored.model_copy(update={"reused": reused})
    evidence = Evidence(runtime=machine.runtime, measured=measured, plan_digest=plan_digest, nonce=nonce)
    return KeptVerdict(verdict=verdict, evidence=evidence)


def _is_of(case: Case, stored: CaseVerdict) -> bool:
    """Whether a stored verdict is that a case passed, with its numbers."""
    complete = all(step.loss is not None and step.grad_norm is not None for step in stored.steps)
    passed = stored.passed and not stored.problems and bool(stored.steps) and complete
    return passed and (stored.id, stored.baseline, stored.repeat) == (case.id, case.compared_with, 1)


def _is_of_job(job: CertifyJob, measured: Measured) -> bool:
    """Whether a run was in the image of a job, and not in the future: a certificate with such a time is refused."""
    if measured.image is None:
        return False
    subject = job.subject
    hashed = subject.sqsh_digest if subject.place == "sqsh" else subject.oci_digest
    return measured.image.file_digest == hashed and not is_after(measured.finished_at, datetime.now(timezone.utc))
