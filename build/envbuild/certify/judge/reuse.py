"""Verdicts of earlier runs: a case that passed is not run again while nothing that decides it changed.

Only an image is known by its content. Of an environment on this machine nobody can say that it is still the one of the
last time, so what trains there trains every time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envbuild.certify.cases import Case
from envbuild.certify.cases.selection import with_baselines
from envbuild.certify.certificate.statement import CaseVerdict, Measured, is_after
from envbuild.certify.judge.judge import Verdict, beside
from envbuild.certify.judge.results import Results, Step
from envbuild.certify.judge.verdicts import case_verdict
from envbuild.certify.run.job import CertifyJob
from envbuild.certify.run.plan import JUDGE_VERSION, computed, tolerance_of
from envbuild.core.digests import Json, digest_of
from envbuild.launch.gpus import Gpu
from envbuild.store import entry_index
from envbuild.store.local import LocalStore

KIND, FILE = "verdicts", "verdict.json"
PREFIX = "NCCL_"
# They change what NCCL says, not what it does.
TALK = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")


@dataclass(frozen=True, kw_only=True)
class MachineKey:
    """What of a machine decides a verdict: the models of its GPUs, their driver, NCCL's settings, and the runtime."""

    runtime: str
    gpus: tuple[str, ...]
    drivers: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]

    @classmethod
    def here(cls, runtime: str, gpus: Iterable[Gpu], variables: Mapping[str, str]) -> MachineKey:
        """The one we are on, as the cases will find it."""
        found = list(gpus)
        return cls(
            runtime=runtime,
            gpus=tuple(sorted({gpu.name for gpu in found})),
            drivers=tuple(sorted({gpu.driver for gpu in found})),
            variables=_settings(variables),
        )

    @classmethod
    def of(cls, runtime: str, results: Results) -> MachineKey:
        """The machine that results are from."""
        machine = results.machine or {}
        gpus = machine.get("gpus", ())
        return cls(
            runtime=runtime,
            gpus=tuple(sorted({gpu["name"] for gpu in gpus})),
            drivers=tuple(sorted({gpu["driver"] for gpu in gpus})),
            variables=_settings(machine.get("variables", {})),
        )


def _settings(variables: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(item for item in variables.items() if item[0].startswith(PREFIX) and item[0] not in TALK))


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a verdict rests on: the plan that was run, and what the run measured beside its cases."""

    measured: Measured
    plan_digest: str
    nonce: str


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A verdict of an earlier run, and what it rests on."""

    verdict: Verdict
    finished_at: str
    proof: Proof


def find(job: CertifyJob, machine: MachineKey, store: LocalStore) -> dict[str, Kept]:
    """The verdicts that need no run, by case; each agrees with that on its baseline.

    A baseline is among them only where nothing that needs its weights has to run.
    """
    if not job.certifies_image or job.asked.repeats > 1:
        return {}
    found = {case.id: kept for case in job.cases if (kept := _read(job, case, machine, store)) is not None}
    found = {name: kept for name, kept in found.items() if _agrees(kept.verdict, found)}
    missing = [case.id for case in job.cases if case.id not in found]
    for case in with_baselines(job.cases, missing):
        found.pop(case.id, None)
    return found


def _agrees(verdict: Verdict, found: Mapping[str, Kept]) -> bool:
    """Whether a verdict is what its numbers give beside its baseline's; True where the baseline will be run."""
    baseline = None if verdict.case.is_baseline else found.get(verdict.case.baseline_id)
    if baseline is None:
        return True
    again = beside(verdict, baseline.verdict)
    return again.passed and _differences(again) == _differences(verdict)


def _differences(verdict: Verdict) -> tuple[float | None, ...]:
    return verdict.largest_loss_difference, verdict.largest_grad_norm_difference, verdict.largest_weights_difference


def keep(job: CertifyJob, verdicts: Sequence[Verdict], machine: MachineKey, proof: Proof, store: LocalStore) -> None:
    """Keep the verdicts of a run in which everything passed."""
    if not job.certifies_image or not store.is_writable:
        return
    for verdict in verdicts:
        if verdict.reused or not verdict.passed or verdict.repeat > 1:
            continue
        content = {
            "schema": "envbuild.verdict/1",
            "case": case_verdict(verdict).model_dump(mode="json", by_alias=True),
            "measured": proof.measured.model_dump(mode="json", by_alias=True),
            "plan_digest": proof.plan_digest,
            "nonce": proof.nonce,
        }
        text = json.dumps(content) + "\n"
        store.rebuild(KIND, key_of(job, verdict.case, machine), partial(_write, text))


def forget(job: CertifyJob, cases: Iterable[Case], machine: MachineKey, store: LocalStore) -> None:
    """Remove the verdicts on cases that did not pass now: what was measured last counts."""
    if job.certifies_image and store.is_writable:
        for case in cases:
            store.remove(KIND, key_of(job, case, machine))


def _write(text: str, folder: Path) -> None:
    (folder / FILE).write_text(text, encoding="utf-8")


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
            "tolerance": tolerance_of(job.matrix, case).model_dump(mode="json"),
            "smoke": job.smoke_digest,
            "judge": JUDGE_VERSION,
            "runtime": machine.runtime,
            "gpus": machine.gpus,
            "drivers": machine.drivers,
            "variables": dict(machine.variables),
        }
    )


def _read(job: CertifyJob, case: Case, machine: MachineKey, store: LocalStore) -> Kept | None:
    path = store.find(KIND, key_of(job, case, machine))
    if path is None:
        return None
    try:
        content = entry_index.read_json(path, FILE)
        stored = CaseVerdict.model_validate_json(json.dumps(content["case"]), strict=True)
        measured = Measured.model_validate_json(json.dumps(content["measured"]), strict=True)
        proof = Proof(measured=measured, plan_digest=str(content["plan_digest"]), nonce=str(content["nonce"]))
    except (ValueError, KeyError, TypeError, ValidationError):
        return None  # damaged, or of another version of envbuild: it is run again
    if (measured.image.file_digest if measured.image else None) != _hashed(job):
        return None
    if is_after(measured.finished_at or measured.started_at, datetime.now(timezone.utc)):
        return None  # a clock was ahead, and nobody would believe a certificate with it
    if not stored.passed or stored.problems or stored.id != case.id or measured.finished_at is None:
        return None
    verdict = _verdict(case, job, stored)
    reused = {"from": measured.finished_at, "run": proof.plan_digest}
    return Kept(verdict=replace(verdict, reused=reused), finished_at=measured.finished_at, proof=proof)


def _hashed(job: CertifyJob) -> str | None:
    """The digest of the file that a runner hashes to know the image."""
    subject = job.subject
    return subject.sqsh_digest if subject.place == "sqsh" else subject.oci_digest


def _verdict(case: Case, job: CertifyJob, stored: CaseVerdict) -> Verdict:
    largest = stored.largest_relative_difference
    return Verdict(
        case=case,
        passed=True,
        largest_loss_difference=largest.loss,
        largest_grad_norm_difference=largest.grad_norm,
        largest_weights_difference=largest.weights,
        tolerance=None if case.is_baseline else tolerance_of(job.matrix, case),
        seconds=stored.seconds,
        devices=stored.devices,
        steps=tuple(
            Step(step=step.step, loss=step.loss or 0.0, grad_norm=step.grad_norm or 0.0, seconds=step.seconds or 0.0)
            for step in stored.steps
        ),
        observed=stored.observed,
    )
