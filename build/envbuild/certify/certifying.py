"""``envbuild certify``: plan, run inside the image, judge, and write a certificate when every case passed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.catalog.models import Driver, Matrix
from envbuild.certify.cases import Case, expand
from envbuild.certify.certificates.reading import read_certificate
from envbuild.certify.certificates.signing import Signer, verifies, write_certificate
from envbuild.certify.certificates.statement import (
    CERTIFICATE_FILE,
    Certificate,
    Measured,
    SmokeRunner,
    make_certificate,
)
from envbuild.certify.judge import Results, Verdict, judge, read_results
from envbuild.certify.plan import DRIVERS, JUDGE_VERSION, Subject, certification_key, make_plan
from envbuild.certify.telling import failure, progress, show
from envbuild.certify.verdicts import case_verdict
from envbuild.certify.zipapp import FILE_NAME, smoke_file
from envbuild.core import locks
from envbuild.core.digests import Json, sha256_bytes, sha256_file
from envbuild.core.errors import (
    CertificateRefusedError,
    CertificationCannotRunError,
    CertificationFailedError,
    CheckRefusedError,
    ConfigurationError,
    MachineError,
    UsageError,
    disk_full,
)
from envbuild.core.files import machine_errors, remove_tree, space_is_low, write_atomic
from envbuild.core.process import ran_out_of_space
from envbuild.core.progress import Reporter
from envbuild.image.outputs import PlacedImage, verify
from envbuild.launch.local import Runtime, probe, run_in_image
from envbuild.lock.locking import is_older
from envbuild.lock.record import Lock, LockDirectory
from envbuild.store import seals
from envbuild.store.local import LocalStore

PLAN_DIR = "/envbuild/plan"
RESULTS_DIR = "/envbuild/results"
SMOKE_CANNOT_RUN = 3
# Time for starting the container and Python, on top of the cases' own limits.
START_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Certification:
    """A passed certification.

    Attributes:
        certificate: its file.
        statement: what is in it.
        ran: whether this call ran the cases.
        lock_is_current: whether the lock was made from the stack and the base as they are now.
        keyid: of the key that signed it; None where nobody did.
        not_counted: why a certificate that was there did not count, in words.
    """

    certificate: Path
    statement: Certificate
    ran: bool
    lock_is_current: bool
    keyid: str | None = None
    not_counted: str = ""


def chosen_cases(matrix: Matrix, matrix_name: str, selection: Selection, only: tuple[str, ...]) -> tuple[Case, ...]:
    """The cases to run: all of the matrix, or those named and the baselines they need.

    Raises:
        UsageError: ``only`` names a case that the matrix does not have.
    """
    cases = expand(matrix, matrix_name, selection.target.device)
    if not only:
        if all(case.is_baseline for case in cases):
            raise ConfigurationError(
                f"matrix {matrix_name} compares nothing",
                why="All its cases are baselines, and a baseline agrees with itself.",
                fix="Add a case with another layout to it.",
            )
        return cases
    known = {case.id: case for case in cases}
    if unknown := [name for name in only if name not in known]:
        raise UsageError(
            f"matrix {matrix_name} has no case {unknown[0]!r}",
            why=f"Its cases: {', '.join(known)}.",
            fix="Choose among these (`envbuild certify --print-cases`).",
        )
    if all(known[name].is_baseline for name in only):
        raise UsageError(
            f"{only[0]} alone compares nothing",
            why="It is a baseline: the case that others are compared with. It runs with each of them by itself.",
            fix=f"Name another case: {', '.join(case.id for case in cases if not case.is_baseline)}.",
        )
    wanted = {*only, *(known[name].baseline_id for name in only)}
    return tuple(case for case in cases if case.id in wanted)


def driver_of(selection: Selection, lock: Lock | None = None) -> Driver:
    """The driver of the cases: what the lock says, and without a lock what the stack's file says.

    Raises:
        CertificationCannotRunError: there are no cases for it, so no image is of use for this.
    """
    stack = selection.stack
    possible, says = [stack.driver], f"The file of stack {selection.stack_name}"
    if lock is not None and lock.driver is not None:
        possible, says = [lock.driver], f"The lock of stack {lock.stack} on {lock.base.name}"
    elif lock is None and stack.takeover is not None:
        possible.append(stack.takeover.driver)
    if not any(driver in DRIVERS for driver in possible):
        names = " or ".join(driver.value for driver in possible)
        known = ", ".join(driver.value for driver in DRIVERS)
        raise CertificationCannotRunError(
            f"there are no certification cases for driver {names} yet",
            why=f"{says} names it as the training code that certifies it; the smoke runner has cases for: {known}.",
            fix=f'Nothing was run. Certify a stack with driver = "{DRIVERS[0].value}", such as stack mcore.',
        )
    return possible[0]


def certify(
    selection: Selection,
    *,
    lock: LockDirectory,
    image: PlacedImage,
    matrix_name: str,
    only: tuple[str, ...],
    out_dir: Path,
    store: LocalStore,
    reporter: Reporter,
    runtime_name: str | None = None,
    fresh: bool = False,
    signer: Signer | None = None,
) -> Certification:
    """Certify an image, unless a certificate for exactly this is there already, as it was written.

    Args:
        only: case IDs to run instead of the whole matrix.
        runtime_name: how the .sqsh is opened, so a certificate made with another one does not count; when None, the
            best that this machine can do, and any certificate counts.
        fresh: run even if a certificate is there.
        signer: whose signature the certificate gets, so one without it does not count; when None, any counts.

    Raises:
        CertificationFailedError: a case did not pass; the results and logs stay.
        CertificationCannotRunError: no runtime, no cases for the stack's driver, or the image lacks the stack.
    """
    job = _make_job(selection, lock, image, matrix_name, only, out_dir, store)
    if not job.lock_is_current:
        reporter.note("note: the lock is older than its stack or base; what is certified is what was locked")
    certificate = job.folder / CERTIFICATE_FILE
    # Two runs of one key share a folder: the second waits, and then finds the certificate.
    waiting = f"another envbuild certifies the same in {job.folder}: waiting for it"
    with locks.exclusive(job.folder.with_name(f".{job.folder.name}.lock"), on_wait=lambda: reporter.note(waiting)):
        standing, not_counted = _standing(certificate, job, runtime_name, signer)
        if not_counted:
            reporter.note(f"note: {certificate} does not count: {not_counted}. Certifying again")
        if standing and not fresh:
            if problem := seals.broken(image.path):
                raise CheckRefusedError(
                    f"the image in {image.path} is not the one that was certified",
                    why=f"{problem} since it was built.",
                    fix=f"Put it right: {image.command}",
                )
            ran = False
        else:
            _certify(job, certificate, _runtime(runtime_name), signer, reporter)
            ran = True
        statement, file = read_certificate(certificate)
    return Certification(
        certificate=certificate,
        statement=statement,
        ran=ran,
        lock_is_current=job.lock_is_current,
        keyid=file.content.signed.keyid if file.content.signed else None,
        not_counted=not_counted,
    )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is certified, with what, and where its files go."""

    plan: dict[str, Json]
    key: str
    cases: tuple[Case, ...]
    matrix_name: str
    matrix: Matrix
    whole_matrix: bool
    lock_is_current: bool
    subject: Subject
    smoke: Path
    smoke_digest: str
    image: PlacedImage
    folder: Path


def _make_job(
    selection: Selection,
    lock: LockDirectory,
    image: PlacedImage,
    matrix_name: str,
    only: tuple[str, ...],
    out_dir: Path,
    store: LocalStore,
) -> _Job:
    driver = driver_of(selection, lock.lock)
    matrix = selection.catalog.matrix(matrix_name)
    cases = chosen_cases(matrix, matrix_name, selection, only)
    if image.record.lock_digest != lock.lock.digest:
        raise ConfigurationError(
            f"the image in {image.path} was made from another lock",
            why=f"It has lock {image.record.lock_digest}; the lock now is {lock.lock.digest}.",
            fix=f"Build it again: {image.command}",
        )
    image.sqsh()
    subject = Subject(
        name=image.name,
        stack=selection.stack_name,
        base=selection.base_name,
        target=selection.target_name,
        lock_digest=lock.lock.digest,
        oci_digest=image.record.oci_digest,
        sqsh_digest=image.record.sqsh_digest or "",
    )
    smoke, smoke_digest = smoke_file(store)
    plan = make_plan(
        subject=subject,
        device=selection.target.device,
        driver=driver,
        matrix=matrix,
        cases=cases,
        expected_versions={**lock.packages(), **{name: item.version for name, item in lock.lock.components.items()}},
    )
    whole = len(cases) == len(expand(matrix, matrix_name, selection.target.device))
    key = certification_key(plan, matrix, smoke_digest, scope=matrix_name if whole else f"part of {matrix_name}")
    folder = out_dir / "certificates" / image.name / key.removeprefix("sha256:")[:12]
    return _Job(
        plan=plan,
        key=key,
        cases=cases,
        matrix_name=matrix_name,
        matrix=matrix,
        whole_matrix=whole,
        lock_is_current=not is_older(lock.lock, selection),
        subject=subject,
        smoke=smoke,
        smoke_digest=smoke_digest,
        image=image,
        folder=folder,
    )


def _certify(job: _Job, certificate: Path, runtime: Runtime, signer: Signer | None, reporter: Reporter) -> None:
    with reporter.step("check the image against its digests"):
        verify(job.image)
    run_dir = job.folder / "run"
    try:
        results, verdicts = _passed(job, run_dir, runtime, reporter)
    except CertificationFailedError:
        # What was measured last counts, also where an earlier run passed.
        certificate.unlink(missing_ok=True)
        raise
    statement = make_certificate(
        name=job.subject.name,
        subject=job.subject.as_json(),
        key=job.key,
        lock_is_current=job.lock_is_current,
        matrix_name=job.matrix_name,
        tolerance={precision.value: band.model_dump(mode="json") for precision, band in job.matrix.tolerance.items()},
        whole_matrix=job.whole_matrix,
        plan_digest=sha256_file(run_dir / "plan" / "plan.json"),
        nonce=str(job.plan["nonce"]),
        judge_version=JUDGE_VERSION,
        runtime=runtime.name,
        measured=Measured(
            smoke=SmokeRunner(version=results.smoke_version, digest=job.smoke_digest),
            environment=dict(results.environment),
            started_at=results.started_at,
            finished_at=results.finished_at,
        ),
        cases=[case_verdict(verdict) for verdict in verdicts],
    )
    write_certificate(certificate, statement, signer)


def _passed(job: _Job, run_dir: Path, runtime: Runtime, reporter: Reporter) -> tuple[Results, tuple[Verdict, ...]]:
    """Run the cases and judge them.

    Raises:
        CertificationFailedError: not every case passed, or it cannot be said.
    """
    results = _run(job, run_dir, runtime, reporter)
    verdicts = judge(job.cases, job.matrix, results)
    show(verdicts, reporter)
    remove_tree(run_dir / "results" / "checkpoints")
    passed = all(verdict.passed for verdict in verdicts)
    if not passed or results.environment_findings or results.finished_at is None:
        if space_is_low(run_dir):
            raise disk_full(run_dir)
        raise failure(verdicts, results, run_dir)
    return results, verdicts


def _runtime(name: str | None) -> Runtime:
    try:
        return probe(name)
    except MachineError as error:
        raise CertificationCannotRunError(error.what, why=error.why, fix=error.fix, log=error.log) from error


def _standing(
    certificate: Path, job: _Job, runtime_name: str | None, signer: Signer | None
) -> tuple[Certificate | None, str]:
    """The certificate that is there, if it is of this job and as it was written; else why it does not count."""
    if not certificate.is_file():
        return None, ""
    try:
        found, file = read_certificate(certificate)
    except CertificateRefusedError as error:
        return None, error.why
    problem = found.mismatch(
        name=job.subject.name,
        subject=job.subject.as_json(),
        key=job.key,
        case_ids=[case.id for case in job.cases],
    )
    if not problem and signer and not verifies(file.content, signer.public):
        problem = f"it is not signed by key {signer.keyid}"
    if not problem and runtime_name not in (None, found.predicate.runtime):
        problem = f"it was made with runtime {found.predicate.runtime}, and {runtime_name} was asked for"
    return (None, problem) if problem else (found, "")


def _run(job: _Job, run_dir: Path, runtime: Runtime, reporter: Reporter) -> Results:
    remove_tree(run_dir)
    results_dir = run_dir / "results"
    plan_bytes = (json.dumps(job.plan, indent=2) + "\n").encode()
    with machine_errors(run_dir):
        results_dir.mkdir(parents=True)
    write_atomic(run_dir / "plan" / "plan.json", plan_bytes)
    log = run_dir / "smoke.log"
    with reporter.step(f"train {len(job.cases)} cases inside the image, network off ({runtime.name})"):
        finished = run_in_image(
            runtime,
            job.image.sqsh(),
            [
                *(job.image.record.python, f"{PLAN_DIR}/{FILE_NAME}", "run"),
                *("--plan", f"{PLAN_DIR}/plan.json", "--out", RESULTS_DIR),
            ],
            read_only={run_dir / "plan" / "plan.json": f"{PLAN_DIR}/plan.json", job.smoke: f"{PLAN_DIR}/{FILE_NAME}"},
            writable={results_dir: RESULTS_DIR},
            env={"PYTHONUNBUFFERED": "1"},
            network=False,
            on_line=progress(reporter),
            log=log,
            timeout_seconds=START_SECONDS + len(job.cases) * (job.matrix.time_limit_seconds + START_SECONDS),
        )
    results_file = results_dir / "results.jsonl"
    if finished.status != 0 and ran_out_of_space(finished.output, run_dir):
        raise disk_full(run_dir)
    if finished.status == SMOKE_CANNOT_RUN or not results_file.is_file():
        raise CertificationCannotRunError(
            "the environment in the image cannot run the plan",
            why=finished.output[-2000:].strip() or f"The runner exited with status {finished.status}.",
            fix=f"The log has the whole story; try it by hand: the plan is {run_dir / 'plan' / 'plan.json'}.",
            log=log,
        )
    return read_results(results_file, sha256_bytes(plan_bytes), str(job.plan["nonce"]))
