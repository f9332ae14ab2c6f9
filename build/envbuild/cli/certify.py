"""``envbuild certify``."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from envbuild.catalog.catalog import Selection
from envbuild.catalog.fields import Device
from envbuild.certify.cases.selection import WantedCases, driver_of
from envbuild.certify.certificate.sign import UNSIGNED
from envbuild.certify.certify import CertifyOptions, certify
from envbuild.certify.issue import Certification
from envbuild.certify.models import NotVouched
from envbuild.certify.offline import ExplicitOptions, judge_folder, write_plan
from envbuild.certify.readme import judge_command
from envbuild.certify.report.describe import describe_matrix, projects_own
from envbuild.certify.run.executors import DEFAULT_VENV, MachineOptions, parse_gpus
from envbuild.certify.run.job import MOST_REPEATS, CertifyJob, CertifyRequest
from envbuild.cli.command import Command, command_line, given_options
from envbuild.cli.common import PathArgument, Session, name_option, out_dir_option, output_options, selection_options
from envbuild.cli.print_cases import PrintedCases
from envbuild.cli.print_cases import print_cases as show_cases
from envbuild.cli.signing import key_options, signer_of
from envbuild.core.digests import short
from envbuild.core.errors import ConfigurationError, InterruptedByUserError, UsageError
from envbuild.core.text import shown
from envbuild.image.output import PlacedImage, find_image
from envbuild.launch.launchers import WORDS, Placement
from envbuild.launch.runtimes import RUNTIMES
from envbuild.lock.lockdir import find_lock

MACHINE = ("gpus", "isolation", "runtime", "venv", "fresh", "resume")
KEY = ("key", "key_password")
# By option: the reason, and the options that have no effect with it.
CONFLICTS = {
    "plan_out": ("It writes a plan, and runs nothing.", (*MACHINE, "judge", *KEY)),
    "judge": ("It judges results that exist already.", MACHINE),
    "print_cases": (
        "It prints the cases of the matrix, and runs nothing.",
        (*MACHINE, "place", "repeat", "cluster", "plan_out", "judge", *KEY),
    ),
}


@click.command("certify", cls=Command)
@selection_options
@name_option
@click.option("--matrix", metavar="NAME", help="The cases; default: the stack's own matrix.")
@click.option("--only", metavar="ID", multiple=True, help="Run this case (and its baseline); may be repeated.")
@click.option("--max-gpus", type=click.IntRange(1), metavar="N", help="Leave out cases that need more GPUs than this.")
@click.option("--cluster", metavar="NAME", help="Refuse less bandwidth between GPUs than this cluster's floor.")
@click.option("--run-known-wrong", is_flag=True, help="Also run cases that the locked versions train wrongly.")
@click.option("--print-cases", is_flag=True, help="Print the cases and run nothing.")
@click.option(
    "--in",
    "place",
    type=click.Choice(WORDS),
    default="sqsh",
    show_default=True,
    help="Where the cases train: the image in one of its forms, a virtual environment, or this one (a lock).",
)
@click.option(
    "--venv", type=PathArgument(file_okay=False), default=DEFAULT_VENV, show_default=True, help="For --in venv."
)
@click.option("--runtime", type=click.Choice(list(RUNTIMES)), help="How the .sqsh is opened; default: the best here.")
@click.option("--gpus", metavar="LIST", help="Use these GPUs alone, by nvidia-smi's index: 0,1.")
@click.option(
    "--isolation",
    type=click.Choice(["live", "process"]),
    help="Rank processes: kept alive (the default), or new ones for every case.",
)
@click.option(
    "--repeat", type=click.IntRange(1, MOST_REPEATS), default=1, show_default=True, help="Train every case N times."
)
@click.option("--fresh", is_flag=True, help="Run also where a certificate exists.")
@click.option("--resume", is_flag=True, help="Resume an interrupted run.")
@click.option(
    "--plan-out", metavar="DIR", type=PathArgument(file_okay=False), help="Write the plan for another machine."
)
@click.option("--judge", metavar="DIR", type=PathArgument(file_okay=False), help="Judge the results of such a plan.")
@key_options
@out_dir_option
@output_options
def command(session: Session, **values: Any) -> None:
    """Train in every parallel layout; pass only if each reproduces the one-process baseline.

    Loss and gradient norm of every step must agree with the baseline's within bands that the run itself measures.
    Inside an image the network is off. A certificate is written when every case passes.
    """
    context = click.get_current_context()
    arguments = Arguments(**values)
    _refuse_conflicts(context)
    selection = session.select_locked(arguments.stack, arguments.target, arguments.base, arguments.name)
    if arguments.print_cases:
        wanted = PrintedCases(
            arguments.matrix, arguments.wanted, arguments.name, run_known_wrong=arguments.run_known_wrong
        )
        show_cases(session, selection, wanted)
        return
    options = _options(session, selection, arguments)
    request = _request(session, selection, arguments)
    if arguments.plan_out is not None:
        _print_plan(session, write_plan(request, arguments.plan_out, session.store), arguments.plan_out)
    elif arguments.judge is not None:
        given = given_options(context)
        # A default is no word of the user's: the plan says where it ran, and how often.
        explicit = ExplicitOptions(
            place=Placement.parse(arguments.place) if "place" in given else None,
            repeats=arguments.repeat if "repeat" in given else None,
        )
        _print(session, judge_folder(request, arguments.judge, session.context, options.signer, explicit))
    else:
        with _resume_help(context):
            _print(session, certify(request, session.context, options))


@dataclass(frozen=True, kw_only=True)
class Arguments:
    stack: str
    base: str | None
    target: str | None
    name: str | None
    matrix: str | None
    only: tuple[str, ...]
    max_gpus: int | None
    run_known_wrong: bool
    cluster: str | None
    print_cases: bool
    place: str
    venv: Path
    runtime: str | None
    gpus: str | None
    isolation: str | None
    repeat: int
    fresh: bool
    resume: bool
    plan_out: Path | None
    judge: Path | None
    key: str | None
    key_password: str | None
    out_dir: Path

    @property
    def wanted(self) -> WantedCases:
        return WantedCases(only=self.only, max_gpus=self.max_gpus)


def _options(session: Session, selection: Selection, arguments: Arguments) -> CertifyOptions:
    """How the cases are run.

    Raises:
        UsageError: an option has no effect.
    """
    gpus = parse_gpus(arguments.gpus) if arguments.gpus is not None else ()
    if gpus and selection.target.device is Device.CPU:
        raise UsageError(
            f"--gpus has no effect with target {selection.target_name}",
            why="The target is the CPU.",
            fix="Leave it out, or name a target with GPUs (`envbuild list targets`).",
        )
    # Refuses a stack for which there are no cases before keys are read or a lock is looked for.
    driver_of(selection, arguments.matrix or selection.matrix_for())
    signer = signer_of(session, arguments.key, arguments.key_password)
    if arguments.key_password is not None and signer is None:
        raise UsageError(
            "--key-password has no effect without a key",
            why="No --key is given, or it is off, and the configuration names none (signing.key).",
            fix="Name the key too (--key FILE), or leave --key-password out.",
        )
    machine = MachineOptions(runtime=arguments.runtime, venv=arguments.venv, gpus=gpus, isolation=arguments.isolation)
    return CertifyOptions(machine=machine, fresh=arguments.fresh, resume=arguments.resume, signer=signer)


def _request(session: Session, selection: Selection, arguments: Arguments) -> CertifyRequest:
    lock = find_lock(session.project, selection, arguments.name)
    # Again, with the lock: its record has the driver of the commit that was locked.
    matrix_name = arguments.matrix or selection.matrix_for(lock.lock.driver)
    driver_of(selection, matrix_name, lock.lock)
    return CertifyRequest(
        selection=selection,
        lock=lock,
        matrix_name=matrix_name,
        out_dir=arguments.out_dir,
        wanted=arguments.wanted,
        place=Placement.parse(arguments.place),
        image=_image(selection, arguments),
        lock_name=arguments.name,
        repeats=arguments.repeat,
        run_known_wrong=arguments.run_known_wrong,
        cluster=arguments.cluster,
    )


@contextlib.contextmanager
def _resume_help(context: click.Context) -> Iterator[None]:
    """Add the command that resumes to the error of an interrupted run."""
    try:
        yield
    # A signal may come to this process, or to the runner, which ends with status 130 then.
    except (KeyboardInterrupt, InterruptedByUserError):
        again = command_line(context, "--resume")
        raise InterruptedByUserError("interrupted; cases that had ended are kept", fix=f"Resume: {again}") from None


def _image(selection: Selection, arguments: Arguments) -> PlacedImage | None:
    """The image to certify; None for a lock, and where results are judged on a machine without it."""
    if not Placement.parse(arguments.place).has_image:
        return None
    names = (selection.stack_name, selection.base_name, selection.target_name)
    try:
        return find_image(arguments.out_dir, *names, arguments.name)
    except ConfigurationError:
        if arguments.judge is None:
            raise
        return None


def _refuse_conflicts(context: click.Context) -> None:
    """Refuse options that have no effect next to others.

    Raises:
        UsageError: there is one.
    """
    given = given_options(context)
    for option, (why, others) in CONFLICTS.items():
        for other in others:
            if {option, other} <= given:
                raise UsageError(
                    f"{_flag(other)} has no effect with {_flag(option)}", why=why, fix=f"Leave {_flag(other)} out."
                )
    place = context.params["place"]
    for option, wanted in (("venv", "venv"), ("runtime", "sqsh")):
        if option in given and place != wanted:
            raise UsageError(
                f"{_flag(option)} has no effect with --in {place}",
                why=f"It is for --in {wanted}.",
                fix="Leave one out.",
            )


def _flag(name: str) -> str:
    return "--in" if name == "place" else f"--{name.replace('_', '-')}"


def _print(session: Session, result: Certification) -> None:
    predicate = result.statement.predicate
    # Of a whole matrix nothing was left out but by shipped conflicts.
    own = "" if predicate.whole_matrix else ", ".join(projects_own(predicate.not_vouched))
    state = "certified" if result.written else "nothing to do: already certified"
    repeats = max(case.repeat for case in predicate.cases)
    count = f"{len({case.id for case in predicate.cases})} cases" + (f", {repeats} times each," if repeats > 1 else "")
    session.done(
        {
            "ran": result.ran,
            "written": result.written,
            "certificate": str(result.certificate.resolve()),
            "reports": {"junit": str(result.reports.junit.resolve()), "page": str(result.reports.page.resolve())},
            "key": predicate.key,
            "matrix": predicate.matrix,
            "matrix_digest": predicate.matrix_digest,
            "matrix_is_shipped": predicate.matrix_is_shipped,
            "signed": result.keyid is not None,
            "keyid": result.keyid,
            "lock_is_current": result.lock_is_current,
            "not_counted": result.not_counted or None,
            "cases": [case.model_dump(mode="json", by_alias=True) for case in predicate.cases],
            "not_vouched": [item.model_dump(mode="json") for item in predicate.not_vouched],
        },
        f"{state}: {count} agree with their baseline, key {short(predicate.key)}",
        *([] if predicate.whole_matrix else [f"a part of matrix {predicate.matrix}, which publishing wants whole"]),
        *([f"left out by the project's own envs/conflicts/: {own}"] if own else []),
        *([] if predicate.matrix_is_shipped else [f"the cases are those of {describe_matrix(predicate)}"]),
        *([_not_vouched(predicate.not_vouched, result.certificate)] if predicate.not_vouched else []),
        f"signed by key {result.keyid}" if result.keyid else UNSIGNED,
        shown(result.certificate),
        shown(result.reports.page),
        shown(result.reports.junit),
    )


def _not_vouched(entries: Sequence[NotVouched], certificate: Path) -> str:
    command = f"envbuild certificate show {shlex.quote(shown(certificate))}"
    return f"not vouched for: {len(entries)} known faults of the locked versions; {command} lists them"


def _print_plan(session: Session, job: CertifyJob, folder: Path) -> None:
    session.done(
        {
            "plan": str(folder.resolve()),
            "nonce": job.plan["nonce"],
            "subject": job.plan["subject"],
            "cases": [case.id for case in job.cases],
        },
        f"{shown(folder)}: a plan of {len(job.cases)} cases, the runner, and README.md with the commands to run it",
        f"judge the results with: {judge_command(job, shlex.quote(shown(folder)))}",
    )
