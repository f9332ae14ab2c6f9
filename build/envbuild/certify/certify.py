"""``envbuild certify``: plan, run, judge, and write a certificate when every case passed."""

from __future__ import annotations

from dataclasses import dataclass, field

from envbuild.catalog.context import Context
from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.certificate.sign import Signer, verifies
from envbuild.certify.certificate.statement import WantedCertificate
from envbuild.certify.issue import Certification, evidence_of, issue_certificate, judge_run, read_certification
from envbuild.certify.run.executors import MachineOptions, open_executor
from envbuild.certify.run.integrity import check_unchanged, verify_and_stamp
from envbuild.certify.run.job import CertifyJob, CertifyRequest, make_job
from envbuild.certify.run.locked_files import locked_records, record_problems
from envbuild.certify.run.run import hold_folder, run_cases
from envbuild.core.errors import (
    CertificateRefusedError,
    CertificationCannotRunError,
    CertificationFailedError,
    ResultsRefusedError,
)
from envbuild.launch.executors import Executor
from envbuild.launch.slurm.record import read_record

# Reasons why nothing could run that are the image's and not the machine's.
REASONS_OF_IMAGE = ("image-lacks-stack", "runner-ended")


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    """How the cases are run.

    Attributes:
        machine: the runtime, environment or GPUs that were named.
        fresh: run even if a certificate exists.
        resume: go on with an interrupted run.
        signer: signs the certificate, so that one without its signature does not count; any counts when None.
    """

    machine: MachineOptions = field(default_factory=MachineOptions)
    fresh: bool = False
    resume: bool = False
    signer: Signer | None = None


def certify(request: CertifyRequest, context: Context, options: CertifyOptions) -> Certification:
    """Certify an image or a lock; an existing certificate of exactly this image is reused.

    Raises:
        CertificationFailedError: a case did not pass; the results and logs stay.
        CertificationCannotRunError: no runtime, no GPUs, no cases for the stack's driver, or no stack where they run.
        ResultsRefusedError: the runner's results are incomplete.
    """
    job = make_job(request, context.store)
    if not job.lock_is_current:
        context.reporter.note("note: the lock is older than its stack or base; the locked versions are certified")
    # Two runs of one key share a folder: the second waits, and then finds the certificate.
    with hold_folder(job, context.reporter):
        not_counted = _why_not_counted(job, context, options)
        # A job that is named is judged, whatever other runs say.
        if not_counted is None and job.certifies_image and not options.fresh and options.machine.job is None:
            # A certificate that stands must be about the files that lie here now, so they are compared also when
            # nothing runs.
            if request.image is not None:
                check_unchanged(request.image, context.store)
            return read_certification(job, written=False)
        if not_counted:
            context.reporter.note(f"note: {job.certificate} does not count: {not_counted}. Certifying again")
        # Before the image is hashed: a machine without a runtime or a driver is refused at once.
        executor = open_executor(job, options.machine, context.reporter)
        if request.image is not None:
            with context.reporter.step("check the image against its digests"):
                verify_and_stamp(request.image, context.store)
        _certify_cases(job, executor, context, options)
        return read_certification(job, ran=True, not_counted=not_counted or "")


def _why_not_counted(job: CertifyJob, context: Context, options: CertifyOptions) -> str | None:
    """Why an existing certificate does not count: None when it does, empty when there is no certificate."""
    if not job.certificate.is_file():
        return ""
    try:
        statement, file = read_certificate(job.certificate)
    except CertificateRefusedError as error:
        return error.why
    wanted = WantedCertificate(
        name=job.subject.name,
        subject=job.subject.as_json(),
        key=job.key,
        case_ids=[case.id for case in job.cases],
        known_wrong=job.known_wrong,
        matrix_digest=job.matrix_digest,
        matrix_is_shipped=job.matrix_is_shipped,
    )
    problem = statement.mismatch(wanted)
    runtime = options.machine.runtime
    if problem := problem or _of_another_cluster(job) or statement.future(context.clock()):
        return problem
    if options.signer and not verifies(file.content, options.signer.public):
        return f"it is not signed by key {options.signer.keyid}"
    if runtime not in (None, statement.predicate.runtime):
        return f"it was made with runtime {statement.predicate.runtime}, not {runtime}"
    return None


def _of_another_cluster(job: CertifyJob) -> str | None:
    """Whether the cases of a certificate ran on another cluster than the one that is named now."""
    record = read_record(job.folder / "run") if job.request.cluster is not None else None
    if record is None or record.cluster == job.request.cluster:
        return None
    return f"its cases ran on cluster {record.cluster}, not on {job.request.cluster}"


def _certify_cases(job: CertifyJob, executor: Executor, context: Context, options: CertifyOptions) -> None:
    """Run the cases, judge them and write the certificate."""
    venv = options.machine.venv if job.request.place.launcher == "venv" else None
    locked = locked_records(job.request.lock, context) if venv else {}
    try:
        run = run_cases(job, executor, options.machine, context, resume=options.resume)
        evidence = evidence_of(job, run, executor.name)
        # Afterwards: the runner has compared the files with these RECORDs.
        changed = record_problems(locked, venv) if venv else []
        verdicts = judge_run(job, run, evidence, context, changed)
    except (CertificationFailedError, ResultsRefusedError, CertificationCannotRunError) as error:
        if not isinstance(error, CertificationCannotRunError) or error.reason in REASONS_OF_IMAGE:
            # The last measurement counts, also where an earlier run passed.
            job.certificate.unlink(missing_ok=True)
        raise
    issue_certificate(job, evidence, verdicts, options.signer, context)
