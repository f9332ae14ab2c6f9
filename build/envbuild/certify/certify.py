"""``envbuild certify``: plan, run, judge, and write a certificate when every case passed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from envbuild.catalog.context import Context
from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.certificate.sign import Signer, verifies
from envbuild.certify.certificate.statement import WantedCertificate
from envbuild.certify.issue import (
    Certification,
    evidence_of,
    issue_certificate,
    judge_run,
    read_certification,
    with_known_wrong,
)
from envbuild.certify.report.console import show
from envbuild.certify.run import durations, reuse
from envbuild.certify.run.executors import MachineOptions, open_executor
from envbuild.certify.run.integrity import check_unchanged, verify_and_stamp
from envbuild.certify.run.job import CertifyJob, CertifyRequest, make_job
from envbuild.certify.run.reuse import KeptVerdict, MachineKey
from envbuild.certify.run.run import hold_folder, interrupted_cases, run_cases
from envbuild.core.errors import (
    CertificateRefusedError,
    CertificationCannotRunError,
    CertificationFailedError,
    ResultsRefusedError,
)
from envbuild.launch.executors import Executor

# Reasons why nothing could run that are the image's and not the machine's.
REASONS_OF_IMAGE = ("image-lacks-stack", "runner-ended")


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    """How the cases are run.

    Attributes:
        machine: the runtime, environment or GPUs that were named.
        fresh: run even if a certificate or verdicts exist.
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
        if not_counted is None and job.certifies_image and not options.fresh:
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
        machine = MachineKey.here(executor.name, options.machine.gpus_used(job), executor.variables())
        kept = _reusable_verdicts(job, machine, context, options)
        if len(kept) < len(job.cases):
            _certify_cases(job, kept, executor, machine, context, options)
        else:
            _certify_kept(job, kept, context, options)
        return read_certification(job, cases_run=len(job.cases) - len(kept), not_counted=not_counted or "")


def _why_not_counted(job: CertifyJob, context: Context, options: CertifyOptions) -> str | None:
    """Why an existing certificate does not count: None when it does, empty when there is no certificate."""
    if not job.certificate.is_file():
        return ""
    try:
        found, file = read_certificate(job.certificate)
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
    problem = found.mismatch(wanted)
    runtime = options.machine.runtime
    if problem := problem or found.future(context.clock()):
        return problem
    if options.signer and not verifies(file.content, options.signer.public):
        return f"it is not signed by key {options.signer.keyid}"
    if runtime not in (None, found.predicate.runtime):
        return f"it was made with runtime {found.predicate.runtime}, not {runtime}"
    return None


def _reusable_verdicts(
    job: CertifyJob, machine: MachineKey, context: Context, options: CertifyOptions
) -> dict[str, KeptVerdict]:
    """The verdicts of earlier runs that count, by case."""
    if options.fresh:
        return {}
    # A resumed run trains the cases that it was planned for, also those that passed elsewhere since.
    resumed = interrupted_cases(job.folder) if options.resume else frozenset()
    kept = reuse.find(job, machine, context.store)
    return {name: item for name, item in kept.items() if name not in resumed}


def _certify_kept(job: CertifyJob, kept: Mapping[str, KeptVerdict], context: Context, options: CertifyOptions) -> None:
    """Write the certificate of cases that all passed before."""
    verdicts = with_known_wrong(job, [kept[case.id].verdict for case in job.cases])
    show(verdicts, (), context.reporter)
    # A certificate has one `measured`: of several earlier runs that of the last.
    newest = max(kept.values(), key=lambda item: item.evidence.measured.finished_at)
    issue_certificate(job, newest.evidence, verdicts, options.signer, context)


def _certify_cases(
    job: CertifyJob,
    kept: Mapping[str, KeptVerdict],
    executor: Executor,
    machine: MachineKey,
    context: Context,
    options: CertifyOptions,
) -> None:
    """Run the other cases, judge them, keep their verdicts and write the certificate."""
    cases = tuple(case for case in job.cases if case.id not in kept)
    try:
        run = run_cases(job, cases, executor, options.machine, context, resume=options.resume)
        evidence = evidence_of(job, run, executor.name)
        verdicts = judge_run(job, run, evidence, kept, context)
    except (CertificationFailedError, ResultsRefusedError, CertificationCannotRunError) as error:
        if not isinstance(error, CertificationCannotRunError) or error.reason in REASONS_OF_IMAGE:
            # The last measurement counts, also where an earlier run passed.
            job.certificate.unlink(missing_ok=True)
            reuse.forget(job, cases, machine, context.store)
        raise
    # Results of another machine than the one found here would be kept under the wrong key.
    if MachineKey.of(executor.name, run.results) == machine:
        reuse.keep(job, verdicts, evidence, machine, context.store)
        failed = {verdict.id for verdict in verdicts if not verdict.passed}
        reuse.forget(job, [case for case in job.cases if case.id in failed], machine, context.store)
    durations.record(json.loads(run.plan.content), verdicts, context.store)
    issue_certificate(job, evidence, verdicts, options.signer, context)
