"""Certification where the hardware is: here, by a command that reaches it, or by hand after a plan was prepared."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.catalog.fields import Device
from envbuild.certify.certificate.sign import Signer
from envbuild.certify.certify import CertifyOptions, certify
from envbuild.certify.issue import Certification
from envbuild.certify.offline import ExplicitOptions, judge_folder, write_plan
from envbuild.certify.run.executors import RESULTS_DIR, MachineOptions
from envbuild.certify.run.job import CertifyJob, CertifyRequest, make_job
from envbuild.certify.run.run import PLAN_FILE, is_interrupted
from envbuild.core.errors import (
    CertificateRefusedError,
    CertificationCannotRunError,
    CertificationFailedError,
    ConfigurationError,
    MachineError,
    ResultsRefusedError,
    UsageError,
)
from envbuild.core.files import remove_tree, write_atomic
from envbuild.core.process import ProcessOptions, run
from envbuild.image.output import SQSH_FILE
from envbuild.launch.launchers import ON_CLUSTER
from envbuild.launch.results_file import RESULTS_FILE
from envbuild.nightly.faults import waits_for_hardware
from envbuild.nightly.models import NightCluster

PLANS = "plans"
PLACEHOLDERS = ("{plan}", "{results}", "{image}")
LOG_FILE = "run-with.log"
# In the folder of a plan whose results failed or do not count.
SPENT = "spent.txt"


@dataclass(frozen=True, kw_only=True)
class HardwareAccess:
    """The command that reaches a target's hardware, and the signer of its certificate.

    Attributes:
        command: what runs a plan there; empty: this machine, and a prepared plan where it is not of the target.
        signer: of the certificate.
    """

    command: str = ""
    signer: Signer | None = None


def parse_run_with(texts: tuple[str, ...], targets: tuple[str, ...]) -> dict[str, str]:
    """``CMD`` or ``TARGET=CMD``, by target; the command of all targets with GPUs under an empty name.

    Raises:
        UsageError: a command has no ``{plan}``, or is given twice.
    """
    by_name: dict[str, str] = {}
    for text in texts:
        name, given, command = text.partition("=")
        # `env A=1 run {plan}` has a `=`, too: only the name of a target counts.
        target, command = (name, command) if given and name in targets else ("", text)
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UsageError(
                "--run-with is not a command", why=f"{command!r}: {error}.", fix="Write it as in a shell."
            ) from error
        if not any("{plan}" in word for word in words):
            raise UsageError(
                "--run-with has no {plan}",
                why=f"{command!r} would not know what to run.",
                fix="Write where the plan's folder goes, such as --run-with 'sbatch --wait run.sh {plan} {results}'.",
            )
        if target in by_name:
            raise UsageError(
                "--run-with is given twice" + (f" for {target}" if target else ""),
                why="A target is reached by one command.",
                fix="Name the targets: --run-with h200='...' --run-with b200='...'.",
            )
        by_name[target] = command
    return by_name


def parse_on(texts: tuple[str, ...], targets: tuple[str, ...], nodes: int) -> dict[str, NightCluster]:
    """``NAME`` or ``TARGET=NAME``, by target; the cluster of all targets with GPUs under an empty name.

    Raises:
        UsageError: a target has two clusters, or is none of the night's.
    """
    by_name: dict[str, NightCluster] = {}
    for text in texts:
        target, _, name = text.rpartition("=")
        if target in by_name or (target and target not in targets):
            why = "It is given twice." if target in by_name else f"The targets are {', '.join(targets)}."
            raise UsageError(f"--on {text!r} is not a cluster of a target", why=why, fix="Write --on TARGET=NAME.")
        by_name[target] = NightCluster(name=name, nodes=nodes)
    return by_name


def cluster_for(on: Mapping[str, NightCluster], selection: Selection) -> NightCluster | None:
    """The cluster that a target is certified on; None: this machine, or a command."""
    return on.get(selection.target_name) or (on.get("") if selection.target.device is Device.CUDA else None)


def command_for(run_with: Mapping[str, str], target: str, device: Device) -> str:
    """The command that reaches a target; empty: there is none, or it needs none."""
    return run_with.get(target) or (run_with.get("", "") if device is Device.CUDA else "")


@dataclass(frozen=True, kw_only=True)
class Certified:
    """A certification, or the folder of the plan that waits for it."""

    done: Certification | None = None
    waiting: Path | None = None


def certify_somewhere(
    request: CertifyRequest, access: HardwareAccess, context: Context, *, again: bool = False
) -> Certified:
    """Certify here or there, or prepare a plan; results that were brought back are judged.

    Args:
        again: a second attempt: every rank process is new.

    Raises:
        CertificationFailedError: a case failed.
        CertificationCannotRunError: nothing could run for another reason than missing hardware.
        ResultsRefusedError: the results of a plan do not count; the next attempt gets another plan.
    """
    job = make_job(request, context.store)
    folder = _current(request.out_dir / PLANS / request.name / job.folder.name)
    # Before the command: a certificate that stands is not measured again, wherever its hardware is.
    if is_certified(job, access.signer):
        return Certified(done=_here(request, job, access, context, again=False))
    if request.place.launcher in ON_CLUSTER:
        return Certified(done=_here(request, job, access, context, again=again))
    # Before the hardware is looked for: somebody ran the plan of an earlier night by hand.
    if (folder / PLAN_FILE).is_file() and has_results(folder):
        return Certified(done=_judged(request, folder, access, context))
    if access.command:
        return Certified(done=_there(request, folder, access, context))
    try:
        return Certified(done=_here(request, job, access, context, again=again))
    except CertificationCannotRunError as error:
        if not waits_for_hardware(error):
            raise
        context.reporter.note(f"{request.selection.target_name}: {error.what}: {error.why}")
    _plan(request, folder, context)
    return Certified(waiting=folder)


def has_results(folder: Path) -> bool:
    """Whether results were brought back to the folder of a plan."""
    # People copy the folder back, or this one file of it (certify/offline.py).
    return (folder / RESULTS_DIR / RESULTS_FILE).is_file() or (folder / RESULTS_FILE).is_file()


def is_certified(job: CertifyJob, signer: Signer | None) -> bool:
    """Whether the certificate of a job is there, and signed by ``signer`` where there is one."""
    from envbuild.certify.certificate.file import open_certificate

    try:
        file = open_certificate(job.certificate)
    except (CertificateRefusedError, ConfigurationError, MachineError):
        return False
    # One that is not signed, or by another key, is judged and signed anew.
    return signer is None or file.keyid == signer.keyid


def _here(
    request: CertifyRequest, job: CertifyJob, access: HardwareAccess, context: Context, *, again: bool
) -> Certification:
    # A rank process that a case left in a bad state cannot fail the next one where each has its own.
    machine = MachineOptions(isolation="process" if again else None)
    # What a killed night measured counts; what a failed attempt did must not.
    resume = not again and is_interrupted(job.folder)
    return certify(request, context, CertifyOptions(machine=machine, resume=resume, signer=access.signer))


def _plan(request: CertifyRequest, folder: Path, context: Context) -> None:
    """The plan of a certification in its folder, unless it waits there already."""
    if not (folder / PLAN_FILE).is_file():
        # One that a killed night began: its plan would have come last.
        remove_tree(folder)
        write_plan(request, folder, context.store)


def _there(request: CertifyRequest, folder: Path, access: HardwareAccess, context: Context) -> Certification:
    _plan(request, folder, context)
    image = request.image.path / SQSH_FILE if request.image else Path()
    # Whole paths: the command may use them in another folder, or on another machine.
    values = {"plan": folder.resolve(), "results": (folder / RESULTS_DIR).resolve(), "image": image.resolve()}
    words = [_filled(word, values) for word in shlex.split(access.command)]
    target = request.selection.target_name
    with context.reporter.step(f"run the plan for {target}: {shlex.join(words)}"):
        finished = run(
            words,
            what=f"run the plan for {target}",
            log=folder / LOG_FILE,
            on_line=context.reporter.update,
            check=False,
            options=ProcessOptions(whole=True),
        )
    # No exit status is a verdict: schedulers end with 0 after failed jobs, and the runner with 1 where a case failed.
    if not has_results(folder):
        raise MachineError(
            f"the command for {target} brought no results",
            why=f"It ended with status {finished.status}, and there is no {folder / RESULTS_DIR / RESULTS_FILE}.",
            fix=f"Read its log, and try it by hand: {shlex.join(words)}. It has to run the plan as "
            f"{folder / 'README.md'} says.",
            log=folder / LOG_FILE,
            reason="no-results",
        )
    return _judged(request, folder, access, context)


def _filled(word: str, values: Mapping[str, Path]) -> str:
    # Not str.format: a command may have braces of its own.
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


def _judged(request: CertifyRequest, folder: Path, access: HardwareAccess, context: Context) -> Certification:
    try:
        return judge_folder(request, folder, context, access.signer, ExplicitOptions())
    except (CertificationFailedError, ResultsRefusedError) as error:
        # A plan is run and judged once: the next attempt gets another one.
        write_atomic(folder / SPENT, f"{error.what}\n{error.why}\n")
        raise


def _current(parent: Path) -> Path:
    """The folder of the plan in force: the first one whose results were not refused."""
    return next(path for number in itertools.count(1) if not ((path := parent / str(number)) / SPENT).is_file())
