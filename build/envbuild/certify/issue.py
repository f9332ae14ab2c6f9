"""Judges a run and issues its certificate, or raises the error of what failed; both with reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild import __version__
from envbuild.catalog.catalog import digest_without_summary
from envbuild.catalog.context import Context
from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.certify.cases.case import Capabilities
from envbuild.certify.cases.coverage import Pair, coverage
from envbuild.certify.cases.known_wrong import cause_and_cure
from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.certificate.sign import Signer, write_certificate
from envbuild.certify.certificate.statement import (
    Certificate,
    CertifiedRun,
    Measured,
    MeasuredBandwidth,
    NodeRecord,
    SmokeRunner,
    make_certificate,
    subject_digests,
)
from envbuild.certify.fields.account import account_of, without_configuration
from envbuild.certify.fields.knowledge import recipes, tried_fields
from envbuild.certify.judge.judge import JUDGE_VERSION, judge, run_problems
from envbuild.certify.judge.network import drain_commands
from envbuild.certify.judge.nodes import number_problems
from envbuild.certify.judge.results import Results
from envbuild.certify.models import CaseVerdict, NotVouched, NotVouchedCase, Problem
from envbuild.certify.report.console import failure, show, show_network
from envbuild.certify.report.files import ReportFiles, end_of, standing_reports, write_reports
from envbuild.certify.report.model import Report, report_of
from envbuild.certify.report.network import network_rows
from envbuild.certify.run.job import CertifyJob
from envbuild.certify.run.run import FinishedRun, logs_of, remove_working_files
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CertificateRefusedError, CertificationFailedError, ConfigurationError, disk_full
from envbuild.core.files import space_is_low
from envbuild.image.output import OCI_DIR
from envbuild.lock.known_wrong import packages_of, versions_of
from envbuild.oci.files import FolderFiles, blob_path
from envbuild.oci.write import docker_manifest
from envbuild_smoke.network.limits import floors_of
from envbuild_smoke.plan.json_reader import as_json
from envbuild_smoke.plan.models import Plan
from envbuild_smoke.results import BandwidthLine

# Whose configuration is accounted for.
LIBRARY = "megatron-core"


@dataclass(frozen=True, kw_only=True)
class Certification:
    """A passed certification.

    Attributes:
        certificate: its file.
        ran: whether this call ran the cases.
        written: whether this call wrote the certificate, which it also does where it judges results of another machine.
        lock_is_current: whether the lock was made from the stack and the base as they are now.
        keyid: of the key that signed it; None without a signature.
        not_counted: why an existing certificate did not count.
        reports: for people and for CI, next to the certificate.
    """

    certificate: Path
    statement: Certificate
    ran: bool
    written: bool
    lock_is_current: bool
    reports: ReportFiles
    keyid: str | None = None
    not_counted: str = ""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What verdicts rest on: the plan that was run, where, and what the run measured next to its cases."""

    runtime: str
    measured: Measured
    plan_digest: str
    nonce: str


def evidence_of(job: CertifyJob, run: FinishedRun, runtime: str) -> Evidence:
    """What a certificate states of a run."""
    results = run.results
    sweeps = tuple(_measured_sweep(run.plan, line) for line in results.measured.sweeps)
    first = next((sweep for sweep in sweeps if sweep.sweep == "node"), None)
    measured = Measured.model_validate(
        {
            "smoke": SmokeRunner(version=results.run.smoke_version, digest=job.smoke_digest),
            "environment": as_json(results.run.environment),
            "machine": as_json(results.run.machine),
            "image": as_json(results.run.image) if results.run.image else None,
            "nodes": list(node_records(results)),
            # A sweep that failed has no figures; the problem gives the reason.
            "bandwidth": first if first is not None and first.failure is None else None,
            "network": sweeps if len(sweeps) > 1 or first is None else (),
            "isolation": results.run.isolation,
            "devices": results.run.devices,
            "gpu_states_before": results.run.gpu_states,
            "gpu_states_after": results.end.gpu_states,
            "started_at": results.run.started_at,
            "finished_at": results.end.finished_at,
        }
    )
    return Evidence(runtime=runtime, measured=measured, plan_digest=run.plan.digest, nonce=run.plan.nonce)


def node_records(results: Results) -> Iterator[NodeRecord]:
    """Each node as it recorded itself, node 0 first."""
    others = sorted(results.nodes, key=lambda line: line.node)
    for node, state in ((0, results.run), *((line.node, line) for line in others)):
        image = state.image.file_digest if state.image else None
        yield NodeRecord(node=node, host=state.host, gpus=state.machine.gpus, image=image)


def _measured_sweep(plan: Plan, line: BandwidthLine) -> MeasuredBandwidth:
    measures = as_json(line)
    names = ("sweep", "nodes", "ranks", "backend", "transports", "points", "all_gather", "all_to_all")
    floors = floors_of(plan.bandwidth, line) if plan.bandwidth else {}
    return MeasuredBandwidth.model_validate(
        {
            **{name: measures[name] for name in names},
            "floor_gigabytes_per_second": floors.get("all_reduce"),
            "failure": line.failure.message if line.failure else None,
        }
    )


def judge_run(
    job: CertifyJob, run: FinishedRun, evidence: Evidence, context: Context, seen: Sequence[Problem] = ()
) -> tuple[CaseVerdict, ...]:
    """The verdicts on all cases of a job, in its order, each passed or known to be wrong.

    Args:
        seen: problems of the run that are not in its results.

    Raises:
        CertificationFailedError: a case failed, or the run as a whole does not count; the reports show why.
    """
    results = run.results
    problems = (*seen, *run_problems(run.plan, results), *number_problems(job.matrix, run.plan, results))
    verdicts = tuple(
        verdict.model_copy(update={"known_wrong": job.known_wrong.get(verdict.id, ())})
        for verdict in judge(job.cases, job.matrix, results, run.plan)
    )
    causes = _causes(job, verdicts)
    show(verdicts, problems, context.reporter, causes)
    rows = network_rows(evidence.measured.network, results.measured.hosts)
    show_network(rows, drain_commands(run.plan, results), context.reporter)
    # Asked before the checkpoints go, which may be what filled the disk.
    is_full = space_is_low(run.folder)
    remove_working_files(run)
    # What is known to be wrong and failed is reported, and no certificate is about it.
    compared = any(verdict.baseline is not None for verdict in vouched(verdicts))
    if not problems and compared and all(verdict.passed or verdict.known_wrong for verdict in verdicts):
        return verdicts
    # Cases that failed for lack of space are no finding about the image: the error names the disk, and no report is
    # left.
    if is_full:
        raise disk_full(run.folder)
    error = failure(verdicts, problems, results, run.folder, causes)
    reports = write_reports(job.folder, _failed_report(job, run, evidence, verdicts, problems, error))
    raise error.with_context(fix=f"{error.fix} {reports.page} shows them.")


def _causes(job: CertifyJob, verdicts: Sequence[CaseVerdict]) -> list[str]:
    """What is known to be wrong and failed: its cause and its cure."""
    names = {name for verdict in verdicts if not verdict.passed for name in verdict.known_wrong}
    return [cause_and_cure(name, entry) for name, entry in job.conflicts.items() if name in names]


def vouched(verdicts: Sequence[CaseVerdict]) -> list[CaseVerdict]:
    """The verdicts on cases that passed in every repeat, as their baselines did."""
    failed = {verdict.id for verdict in verdicts if not verdict.passed}
    return [verdict for verdict in verdicts if verdict.id not in failed and verdict.baseline not in failed]


def _not_vouched(job: CertifyJob, verdicts: Sequence[CaseVerdict]) -> Iterator[NotVouched]:
    """What is known to be wrong, with how its cases ended here."""
    for name, entry in job.conflicts.items():
        yield NotVouched(
            name=name,
            digest=digest_without_summary(entry),
            is_shipped=name not in job.own_conflicts,
            versions=packages_of(entry, job.request.lock),
            what=entry.setting(),
            why=entry.summary,
            evidence=entry.evidence,
            fix=entry.fix,
            fixed_in=entry.fixed_in,
            cases=tuple(_outcome(case, verdicts) for case, names in job.known_wrong.items() if name in names),
        )


def _outcome(case_id: str, verdicts: Sequence[CaseVerdict]) -> NotVouchedCase:
    repeats = [verdict for verdict in verdicts if verdict.id == case_id]
    if not repeats:
        return NotVouchedCase(id=case_id, result="not run")
    problems = [str(problem) for verdict in repeats for problem in verdict.problems]
    if not problems and repeats[0] not in vouched(verdicts):
        problems = [f"its baseline {repeats[0].baseline} failed"]
    return NotVouchedCase(id=case_id, result="failed" if problems else "passed", problem=(*problems, "")[0])


def _certified_run(job: CertifyJob, evidence: Evidence, verdicts: Sequence[CaseVerdict]) -> CertifiedRun:
    """What certificates and reports share."""
    subject, version = job.subject, versions_of(job.request.lock).get(LIBRARY)
    account = account_of(vouched(verdicts), version, recipes(), tried_fields()) if version else None
    return CertifiedRun(
        stack=subject.stack,
        base=subject.base,
        target=subject.target,
        form=subject.place.form,
        launcher=subject.place.launcher,
        runtime=evidence.runtime,
        lock_digest=subject.lock_digest,
        matrix=job.request.matrix_name,
        matrix_is_shipped=job.matrix_is_shipped,
        whole_matrix=job.whole_matrix and job.unexcused <= {verdict.id for verdict in vouched(verdicts)},
        plan_digest=evidence.plan_digest,
        nonce=evidence.nonce,
        envbuild=__version__,
        judge=JUDGE_VERSION,
        measured=evidence.measured,
        cases=tuple(map(without_configuration, verdicts)),
        not_vouched=tuple(_not_vouched(job, verdicts)),
        fields=account,
    )


def _failed_report(
    job: CertifyJob,
    run: FinishedRun,
    evidence: Evidence,
    verdicts: Sequence[CaseVerdict],
    problems: Sequence[Problem],
    error: CertificationFailedError,
) -> Report:
    return Report(
        **dict(_certified_run(job, evidence, verdicts)),
        passed=False,
        name=job.subject.name,
        what=error.what,
        digests=subject_digests(job.subject.name, job.subject.as_json()),
        problems=tuple(problems),
        findings=run.results.findings,
        hosts=dict(run.results.measured.hosts),
        drain=drain_commands(run.plan, run.results),
        pairs=_pairs(job),
        logs=logs_of(job, run.folder),
        log=str(error.log),
        log_end=end_of(error.log) if error.log else "",
    )


def _pairs(job: CertifyJob) -> tuple[Pair, ...]:
    capabilities = Capabilities.for_selection(job.request.selection, job.request.lock.packages())
    return coverage(job.matrix, job.cases, capabilities)


def issue_certificate(
    job: CertifyJob, evidence: Evidence, verdicts: Sequence[CaseVerdict], signer: Signer | None, context: Context
) -> None:
    """Write the certificate of what passed; report when an existing signature is lost by it."""
    if signer is None and (keyid := _signed_by(job.certificate)):
        context.reporter.note(
            f"note: {job.certificate} was signed by key {keyid}; the new one is not signed (no --key)"
        )
    # Cases that failed as known are in not_vouched alone.
    run = _certified_run(job, evidence, verdicts).model_copy(
        update={"cases": tuple(map(without_configuration, vouched(verdicts)))}
    )
    predicate = {
        **run.model_dump(mode="json", by_alias=True),
        "key": job.key,
        "verdict": "passed",
        "lock_is_current": job.lock_is_current,
        "matrix_digest": job.matrix_digest,
        "tolerance": {
            precision: band.model_dump(mode="json", exclude_none=True)
            for precision, band in job.matrix.tolerance.items()
        },
        "issued_at": context.clock().strftime(MOMENT_FORMAT),
    }
    subjects = subject_digests(job.subject.name, job.subject.as_json())
    if job.request.image is not None and job.certifies_image:
        # Clients without OCI know the image by the digest of docker's manifest, which registries have next to it.
        layout = FolderFiles(job.request.image.path / OCI_DIR)
        manifest = layout.read(blob_path(job.request.image.record.oci_digest))
        subjects[f"{job.subject.name}.docker"] = sha256_bytes(docker_manifest(manifest))
    statement = make_certificate(subjects, predicate)
    write_certificate(job.certificate, statement, signer)


def _signed_by(certificate: Path) -> str | None:
    """The key that an existing certificate names; None without a certificate or a signature."""
    try:
        return read_certificate(certificate)[1].keyid
    except (CertificateRefusedError, ConfigurationError):
        return None


def read_certification(
    job: CertifyJob, *, ran: bool = False, written: bool = True, not_counted: str = "", folder: Path | None = None
) -> Certification:
    """The certification of a certificate that counts.

    Args:
        folder: of the run, if that is not the job's.
    """
    statement, file = read_certificate(job.certificate)
    reports = standing_reports(job.folder, job.certificate)
    # Reports that stand are not written again: a command that has nothing to do imports no jinja2.
    if reports is None:
        logs = logs_of(job, folder or job.folder / "run")
        details = {"name": job.subject.name, "keyid": file.keyid, "logs": logs, "pairs": _pairs(job)}
        reports = write_reports(job.folder, report_of(statement, **details))
    return Certification(
        certificate=job.certificate,
        statement=statement,
        ran=ran,
        written=written,
        lock_is_current=job.lock_is_current,
        keyid=file.keyid,
        reports=reports,
        not_counted=not_counted,
    )
