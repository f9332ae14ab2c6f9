"""``envbuild certify``: plan, run, judge, and write a certificate when every case passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from envbuild import __version__
from envbuild.certify.cases import Case
from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.certificate.sign import Signer, verifies, write_certificate
from envbuild.certify.certificate.statement import (
    CERTIFICATE_FILE,
    Certificate,
    Measured,
    MeasuredBandwidth,
    SmokeRunner,
    make_certificate,
    subject_digests,
)
from envbuild.certify.certificate.statement import Problem as ReportedProblem
from envbuild.certify.judge import reuse
from envbuild.certify.judge.judge import Verdict, beside, judge, run_problems
from envbuild.certify.judge.problems import Problem
from envbuild.certify.judge.results import Results
from envbuild.certify.judge.reuse import Kept, MachineKey, Proof
from envbuild.certify.judge.verdicts import case_verdict, tolerances_json
from envbuild.certify.report.console import failure, show
from envbuild.certify.report.report import (
    EnvironmentDifference,
    Report,
    ReportFiles,
    end_of,
    report_of,
    standing_reports,
    write_reports,
)
from envbuild.certify.run import durations
from envbuild.certify.run.executors import Machinery, open_way
from envbuild.certify.run.integrity import check_unchanged, verify_and_note
from envbuild.certify.run.job import CertifyJob, CertifyRequest, make_job
from envbuild.certify.run.plan import JUDGE_VERSION
from envbuild.certify.run.run import FinishedRun, held, interrupted_cases, logs_of, remove_working_files, run_plan
from envbuild.core.errors import (
    CertificateRefusedError,
    CertificationCannotRunError,
    CertificationFailedError,
    ConfigurationError,
    ResultsRefusedError,
    disk_full,
)
from envbuild.core.files import space_is_low
from envbuild.core.progress import Reporter
from envbuild.store.local import LocalStore

# Why nothing could run, where that tells of the image and not of the machine.
OF_THE_IMAGE = ("image-lacks-stack", "runner-ended")


@dataclass(frozen=True, kw_only=True)
class Certification:
    """A passed certification.

    Attributes:
        certificate: its file.
        statement: what is in it.
        cases_run: how many cases this call ran; none where a certificate was there, or all had passed before.
        written: whether this call wrote it, also where all cases had passed before.
        lock_is_current: whether the lock was made from the stack and the base as they are now.
        keyid: of the key that signed it; None where nobody did.
        not_counted: why a certificate that was there did not count, in words.
        reports: for people and for CI, beside the certificate.
    """

    certificate: Path
    statement: Certificate
    cases_run: int
    written: bool
    lock_is_current: bool
    reports: ReportFiles
    keyid: str | None = None
    not_counted: str = ""

    @property
    def ran(self) -> bool:
        """Whether this call ran anything."""
        return self.cases_run > 0


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    """How the cases are run.

    Attributes:
        machinery: the runtime, environment or GPUs that were named.
        fresh: run even if a certificate or verdicts are there.
        resume: go on with an interrupted run.
        signer: whose signature the certificate gets, so one without it does not count; when None, any counts.
    """

    machinery: Machinery = field(default_factory=Machinery)
    fresh: bool = False
    resume: bool = False
    signer: Signer | None = None


DEFAULT = CertifyOptions()


def certify(
    asked: CertifyRequest, store: LocalStore, reporter: Reporter, how: CertifyOptions = DEFAULT
) -> Certification:
    """Certify an image or a lock, unless a certificate for exactly this image is there already, as it was written.

    Raises:
        CertificationFailedError: a case did not pass; the results and logs stay.
        CertificationCannotRunError: no runtime, no GPUs, no cases for the stack's driver, or no stack where they run.
        ResultsRefusedError: the runner's results are not whole.
    """
    job = make_job(asked, store)
    if not job.lock_is_current:
        reporter.note("note: the lock is older than its stack or base; what is certified is what was locked")
    certificate = job.folder / CERTIFICATE_FILE
    # Two runs of one key share a folder: the second waits, and then finds the certificate.
    with held(job, reporter):
        stands, not_counted = _stands(certificate, job, how)
        if not_counted:
            reporter.note(f"note: {certificate} does not count: {not_counted}. Certifying again")
        if stands and not how.fresh and job.certifies_image:
            if asked.image is not None:
                check_unchanged(asked.image, store)
            return certification(certificate, job, cases_run=0, written=False)
        count = _certify(job, certificate, store, reporter, how)
        return certification(certificate, job, cases_run=count, not_counted=not_counted)


def certification(
    certificate: Path,
    job: CertifyJob,
    *,
    cases_run: int,
    written: bool = True,
    not_counted: str = "",
    ran: Path | None = None,
) -> Certification:
    """A certificate that counts, read.

    Args:
        ran: where its run has its files, if that is not the job's folder.
    """
    statement, file = read_certificate(certificate)
    keyid = file.content.signed.keyid if file.content.signed else None
    return Certification(
        certificate=certificate,
        statement=statement,
        cases_run=cases_run,
        written=written,
        lock_is_current=job.lock_is_current,
        keyid=keyid,
        reports=standing_reports(job.folder, certificate)
        or write_reports(
            job.folder,
            report_of(statement, name=job.subject.name, keyid=keyid, logs=logs_of(job, ran or job.folder / "run")),
        ),
        not_counted=not_counted,
    )


def _stands(certificate: Path, job: CertifyJob, how: CertifyOptions) -> tuple[bool, str]:
    """Whether there is a certificate of this job, as it was written; where there is another, why it does not count."""
    if not certificate.is_file():
        return False, ""
    try:
        found, file = read_certificate(certificate)
    except CertificateRefusedError as error:
        return False, error.why
    problem = found.mismatch(
        name=job.subject.name,
        subject=_texts(job.subject.as_json()),
        key=job.key,
        case_ids=[case.id for case in job.cases],
        matrix_digest=job.matrix_digest,
        matrix_is_shipped=job.matrix_is_shipped,
    )
    problem = problem or found.future(datetime.now(timezone.utc))
    runtime = how.machinery.runtime
    if not problem and how.signer and not verifies(file.content, how.signer.public):
        problem = f"it is not signed by key {how.signer.keyid}"
    if not problem and runtime not in (None, found.predicate.runtime):
        problem = f"it was made with runtime {found.predicate.runtime}, and {runtime} was asked for"
    return not problem, problem


def _signed_by(certificate: Path) -> str | None:
    """The key that signed the certificate that is there, by its own words; None where there is none."""
    try:
        _, file = read_certificate(certificate)
    except (CertificateRefusedError, ConfigurationError):
        return None
    return file.content.signed.keyid if file.content.signed else None


def _texts(subject: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in subject.items()}


def _certify(job: CertifyJob, certificate: Path, store: LocalStore, reporter: Reporter, how: CertifyOptions) -> int:
    """Run what must run, and write the certificate; how many cases ran."""
    way = open_way(job, how.machinery, reporter)
    if job.asked.image is not None:
        with reporter.step("check the image against its digests"):
            verify_and_note(job.asked.image, store)
    machine = MachineKey.here(way.name, how.machinery.gpus_used(job), way.variables())
    kept = {} if how.fresh else reuse.find(job, machine, store)
    # What an interrupted run was to run is run by it, also where it passed elsewhere since.
    going_on = interrupted_cases(job.folder) if how.resume else frozenset()
    kept = {name: item for name, item in kept.items() if name not in going_on}
    cases = tuple(case for case in job.cases if case.id not in kept)
    if not cases:
        show(reused := [kept[case.id].verdict for case in job.cases], (), reporter)
        newest = max(kept.values(), key=lambda item: item.finished_at)
        write_proven(job, certificate, way.name, newest.proof, reused, how.signer, reporter)
        return 0
    plan = job.plan_of(cases)
    try:
        run = run_plan(job, plan, way, reporter, how.machinery.arguments(), resume=how.resume)
        verdicts = passed(job, cases, run, kept, reporter, way.name)
    except (CertificationFailedError, ResultsRefusedError, CertificationCannotRunError) as error:
        if isinstance(error, CertificationCannotRunError) and error.reason not in OF_THE_IMAGE:
            raise
        # What was measured last counts, also where an earlier run passed.
        certificate.unlink(missing_ok=True)
        reuse.forget(job, cases, machine, store)
        raise
    proof = proof_of(job, run)
    if MachineKey.of(way.name, run.results) == machine:
        reuse.keep(job, verdicts, machine, proof, store)
    durations.record(run.plan, verdicts, store)
    write_proven(job, certificate, way.name, proof, verdicts, how.signer, reporter)
    return len(cases)


def passed(
    job: CertifyJob, cases: Sequence[Case], run: FinishedRun, kept: Mapping[str, Kept], reporter: Reporter, runtime: str
) -> tuple[Verdict, ...]:
    """The verdicts on all cases of a job, in its order, each passed; where they are not, reports say so.

    Raises:
        CertificationFailedError: not every case passed, or the run as a whole does not count.
    """
    results = run.results
    judged = judge(tuple(cases), job.matrix, results, run.plan)
    baselines = {verdict.case.id: verdict for verdict in judged if verdict.passed and verdict.case.is_baseline}
    problems = run_problems(run.plan, results)
    by_case: dict[str, list[Verdict]] = {
        # Beside a baseline that was measured again.
        name: [beside(item.verdict, baselines[item.verdict.case.baseline_id])]
        if item.verdict.case.baseline_id in baselines
        else [item.verdict]
        for name, item in kept.items()
    }
    for verdict in judged:
        by_case.setdefault(verdict.case.id, []).append(verdict)
    verdicts = tuple(verdict for case in job.cases for verdict in by_case.get(case.id, ()))
    show(verdicts, problems, reporter)
    remove_working_files(run)
    if problems or not all(verdict.passed for verdict in verdicts):
        if space_is_low(run.folder):
            raise disk_full(run.folder)
        error = failure(verdicts, problems, results, run.folder)
        reports = write_reports(job.folder, _report_of_failure(job, run, verdicts, problems, error, runtime))
        raise error.with_context(fix=f"{error.fix} {reports.page} shows them.")
    return verdicts


def _report_of_failure(
    job: CertifyJob,
    run: FinishedRun,
    verdicts: Sequence[Verdict],
    problems: Sequence[Problem],
    error: CertificationFailedError,
    runtime: str,
) -> Report:
    """What reports say of a run in which not everything passed."""
    subject = job.subject
    return Report(
        passed=False,
        name=subject.name,
        what=error.what,
        stack=subject.stack,
        base=subject.base,
        target=subject.target,
        in_=subject.place,
        runtime=runtime,
        digests=subject_digests(subject.name, _texts(subject.as_json())),
        lock_digest=subject.lock_digest,
        matrix=job.asked.matrix_name,
        matrix_is_shipped=job.matrix_is_shipped,
        whole_matrix=job.whole_matrix,
        cases=tuple(case_verdict(verdict) for verdict in verdicts),
        problems=tuple(ReportedProblem(check=problem.check, text=problem.text) for problem in problems),
        findings=tuple(EnvironmentDifference.model_validate(dict(item)) for item in run.results.environment_findings),
        measured=measured_of(run.results, job.smoke_digest, run.plan),
        plan_digest=run.plan_digest,
        nonce=str(run.plan["nonce"]),
        envbuild=__version__,
        judge=JUDGE_VERSION,
        logs=logs_of(job, run.folder),
        log=str(error.log),
        log_end=end_of(error.log) if error.log else "",
    )


def proof_of(job: CertifyJob, run: FinishedRun) -> Proof:
    """What a certificate says of a run."""
    return Proof(
        measured=measured_of(run.results, job.smoke_digest, run.plan),
        plan_digest=run.plan_digest,
        nonce=str(run.plan["nonce"]),
    )


def measured_of(results: Results, smoke_digest: str, plan: Mapping[str, Any]) -> Measured:
    """What a run measured beside its cases."""
    bandwidth = None
    # Of a sweep that failed there are no figures; the problem says why.
    if results.bandwidth is not None and results.bandwidth["failure"] is None:
        fields = {name: results.bandwidth[name] for name in ("ranks", "backend", "transports", "points")}
        floor = (plan["bandwidth"] or {}).get("floor_gigabytes_per_second")
        bandwidth = MeasuredBandwidth.model_validate({**fields, "floor_gigabytes_per_second": floor})
    return Measured.model_validate(
        {
            "smoke": SmokeRunner(version=results.smoke_version, digest=smoke_digest),
            "environment": dict(results.environment),
            "machine": results.machine,
            "image": results.image,
            "bandwidth": bandwidth,
            "isolation": results.isolation,
            "devices": results.devices,
            "started_at": results.started_at,
            "finished_at": results.finished_at,
        }
    )


def write_proven(
    job: CertifyJob,
    certificate: Path,
    runtime: str,
    proof: Proof,
    verdicts: Sequence[Verdict],
    signer: Signer | None,
    reporter: Reporter,
) -> None:
    """Write the certificate of what passed; says when a signature is lost by it."""
    if signer is None and (keyid := _signed_by(certificate)):
        reporter.note(f"note: {certificate} was signed by key {keyid}; the new one is not signed (no --key)")
    statement = make_certificate(
        name=job.subject.name,
        subject=_texts(job.subject.as_json()),
        key=job.key,
        lock_is_current=job.lock_is_current,
        matrix_name=job.asked.matrix_name,
        matrix_digest=job.matrix_digest,
        matrix_is_shipped=job.matrix_is_shipped,
        tolerance=tolerances_json(job.matrix),
        whole_matrix=job.whole_matrix,
        plan_digest=proof.plan_digest,
        nonce=proof.nonce,
        judge_version=JUDGE_VERSION,
        runtime=runtime,
        measured=proof.measured,
        cases=[case_verdict(verdict) for verdict in verdicts],
    )
    write_certificate(certificate, statement, signer)
