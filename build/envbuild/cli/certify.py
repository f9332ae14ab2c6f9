"""``envbuild certify``."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
from click.core import ParameterSource

from envbuild.catalog.catalog import Selection
from envbuild.catalog.models import Device
from envbuild.certify.calibrate import Calibration
from envbuild.certify.calibrate import calibrate as propose_tolerances
from envbuild.certify.cases.selection import driver_of
from envbuild.certify.certificate.describe import matrix_in_words
from envbuild.certify.certificate.sign import UNSIGNED
from envbuild.certify.certify import Certification, CertifyOptions, certify
from envbuild.certify.offline import Stated, judge_folder, write_plan
from envbuild.certify.run.executors import DEFAULT_VENV, Machinery, parse_gpus
from envbuild.certify.run.job import MOST_REPEATS, CertifyJob, CertifyRequest
from envbuild.cli.command import Command, command_line
from envbuild.cli.common import PathArgument, Session, name_option, out_dir_option, output_options, selection_options
from envbuild.cli.print_cases import print_cases as show_cases
from envbuild.cli.signing import key_options, signer_of
from envbuild.core.digests import short
from envbuild.core.errors import ConfigurationError, InterruptedByUserError, UsageError
from envbuild.core.text import shown
from envbuild.image.output import PlacedImage, find_image
from envbuild.launch.executors import WITHOUT_IMAGE, Where
from envbuild.launch.open_image import RUNTIMES
from envbuild.lock.locate import find_lock

# What a plan that is only written, or judged, has no use for.
MACHINERY = ("gpus", "isolation", "runtime", "venv", "fresh", "resume")
KEY = ("key", "key_password")


@click.command("certify", cls=Command)
@selection_options
@name_option
@click.option("--matrix", metavar="NAME", help="The cases; default: the stack's own matrix.")
@click.option("--only", metavar="ID", multiple=True, help="Run this case (and its baseline); may be repeated.")
@click.option("--print-cases", is_flag=True, help="Print the cases and run nothing.")
@click.option(
    "--in",
    "place",
    type=click.Choice(get_args(Where)),
    default="sqsh",
    show_default=True,
    help="Where the cases train: the image in one of its forms, a virtual environment, or this one (a lock).",
)
@click.option(
    "--venv", type=PathArgument(file_okay=False), default=DEFAULT_VENV, show_default=True, help="For --in venv."
)
@click.option("--runtime", type=click.Choice(list(RUNTIMES)), help="How the .sqsh is opened; default: the best here.")
@click.option("--gpus", metavar="LIST", help="Use these GPUs alone, by nvidia-smi's index: 0,1.")
@click.option("--isolation", type=click.Choice(["live", "process"]), help="Rank processes: kept alive, or one a case.")
@click.option(
    "--repeat", type=click.IntRange(1, MOST_REPEATS), default=1, show_default=True, help="Train every case so often."
)
@click.option("--fresh", is_flag=True, help="Run all cases, also those that passed before.")
@click.option("--resume", is_flag=True, help="Go on with a run that was interrupted.")
@click.option(
    "--plan-out", metavar="DIR", type=PathArgument(file_okay=False), help="Write the plan for another machine."
)
@click.option("--judge", metavar="DIR", type=PathArgument(file_okay=False), help="Judge what came back of such a plan.")
@click.option(
    "--calibrate",
    metavar="N",
    type=click.IntRange(2, MOST_REPEATS),
    help="Propose tolerances from N repeats; certify nothing.",
)
@key_options
@out_dir_option
@output_options
def command(
    session: Session,
    stack: str,
    base: str | None,
    target: str | None,
    name: str | None,
    matrix: str | None,
    only: tuple[str, ...],
    print_cases: bool,
    place: Where,
    venv: Path,
    runtime: str | None,
    gpus: str | None,
    isolation: str | None,
    repeat: int,
    fresh: bool,
    resume: bool,
    plan_out: Path | None,
    judge: Path | None,
    calibrate: int | None,
    key: str | None,
    key_password: str | None,
    out_dir: Path,
) -> None:
    """Train in every parallel layout; pass only if each reproduces the one-process baseline.

    Loss and gradient norm of every step must agree with the baseline's within the matrix's tolerance. Inside an image
    the network is off. A certificate is written when every case passes.
    """
    _refuse_idle(click.get_current_context())
    selection = session.select(stack, target, base)
    matrix_name = matrix or selection.stack.matrix
    if print_cases:
        show_cases(session, selection, matrix_name, only, name)
        return
    chosen = parse_gpus(gpus) if gpus is not None else ()
    if chosen and selection.target.device is Device.CPU:
        raise UsageError(
            f"--gpus does nothing for target {selection.target_name}",
            why="It is for the CPU.",
            fix="Leave it out, or name a target with GPUs (`envbuild list targets`).",
        )
    driver_of(selection)
    machinery = Machinery(runtime=runtime, venv=venv, gpus=chosen, isolation=isolation)
    how = CertifyOptions(machinery=machinery, fresh=fresh, resume=resume, signer=signer_of(session, key, key_password))
    if key_password is not None and how.signer is None:
        raise UsageError(
            "--key-password does nothing without a key",
            why="No --key is given, or it is off, and the configuration names none (signing.key).",
            fix="Name the key too (--key FILE), or leave --key-password out.",
        )
    lock = find_lock(session.project, selection, name)
    driver_of(selection, lock.lock)
    asked = CertifyRequest(
        selection=selection,
        lock=lock,
        matrix_name=matrix_name,
        out_dir=out_dir,
        only=only,
        place=place,
        image=_image(selection, out_dir, name, place, needed=judge is None),
        lock_name=name,
        repeats=calibrate or repeat,
    )
    if calibrate is not None:
        with _going_on():
            proposed = propose_tolerances(asked, session.store, session.reporter, how)
        _tell_calibration(session, proposed)
    elif plan_out is not None:
        _tell_plan(session, write_plan(asked, plan_out, session.store), plan_out)
    elif judge is not None:
        given = _given(click.get_current_context())
        stated = Stated(place=place if "place" in given else None, repeats=repeat if "repeat" in given else None)
        _tell(session, judge_folder(asked, judge, session.store, session.reporter, how, stated))
    else:
        with _going_on():
            done = certify(asked, session.store, session.reporter, how)
        _tell(session, done)


@contextlib.contextmanager
def _going_on() -> Iterator[None]:
    """Say how an interrupted run goes on."""
    try:
        yield
    except (KeyboardInterrupt, InterruptedByUserError):
        again = command_line(click.get_current_context(), "--resume")
        raise InterruptedByUserError(
            "interrupted; cases that had ended are kept", fix=f"Go on with the rest: {again}"
        ) from None


def _image(selection: Selection, out_dir: Path, name: str | None, place: Where, *, needed: bool) -> PlacedImage | None:
    """The image that is certified; None for a lock, and where results are judged on a machine that has none."""
    if place in WITHOUT_IMAGE:
        return None
    try:
        return find_image(out_dir, selection.stack_name, selection.base_name, selection.target_name, name)
    except ConfigurationError:
        if needed:
            raise
        return None


def _refuse_idle(context: click.Context) -> None:
    """Refuse options that the others leave nothing to do.

    Raises:
        UsageError: there is one.
    """
    given = _given(context)
    idle: list[tuple[str, str, str]] = [
        *(("plan_out", name, "It writes a plan, and runs nothing.") for name in (*MACHINERY, "judge", *KEY)),
        *(("judge", name, "It judges what ran already.") for name in MACHINERY),
        *(
            ("calibrate", name, "It certifies nothing, and trains everything as often as it says.")
            for name in ("plan_out", "judge", "repeat", "fresh", *KEY)
        ),
        *(
            ("print_cases", name, "It prints the cases of the matrix, and runs nothing.")
            for name in (*MACHINERY, "place", "repeat", "plan_out", "judge", "calibrate", *KEY)
        ),
    ]
    for option, other, why in idle:
        if {option, other} <= given:
            raise UsageError(
                f"{_flag(other)} does nothing with {_flag(option)}", why=why, fix=f"Leave {_flag(other)} out."
            )
    place = context.params["place"]
    for option, wanted in (("venv", "venv"), ("runtime", "sqsh")):
        if option in given and place != wanted:
            raise UsageError(
                f"{_flag(option)} does nothing with --in {place}", why=f"It is for --in {wanted}.", fix="Leave one out."
            )


def _given(context: click.Context) -> set[str]:
    """The options that were given, and not left at their defaults."""
    defaults = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    return {name for name in context.params if context.get_parameter_source(name) not in defaults}


def _flag(name: str) -> str:
    return "--in" if name == "place" else f"--{name.replace('_', '-')}"


def _tell(session: Session, result: Certification) -> None:
    predicate = result.statement.predicate
    state = "certified" if result.written else "nothing to do: already certified"
    reused = sum(case.reused is not None for case in predicate.cases)
    repeats = max(case.repeat for case in predicate.cases)
    count = f"{len({case.id for case in predicate.cases})} cases" + (f", {repeats} times each," if repeats > 1 else "")
    session.done(
        {
            "ran": result.ran,
            "cases_run": result.cases_run,
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
            "cases": result.statement.cases_json(),
        },
        f"{state}: {count} agree with their baseline, key {short(predicate.key)}",
        *([] if predicate.matrix_is_shipped else [f"the cases are those of {matrix_in_words(predicate)}"]),
        *([_reused(reused, len(predicate.cases))] if reused else []),
        f"signed by key {result.keyid}" if result.keyid else UNSIGNED,
        shown(result.certificate),
        shown(result.reports.page),
        shown(result.reports.junit),
    )


def _reused(reused: int, cases: int) -> str:
    which = "all of them" if reused == cases else f"{reused} of them"
    return f"{which} passed in an earlier run and were not run again"


def _tell_calibration(session: Session, result: Calibration) -> None:
    session.done(
        {
            "proposal": str(result.proposal.resolve()),
            "spreads": {case: dict(numbers) for case, numbers in result.spreads.items()},
            "bands": {place: dict(numbers) for place, numbers in result.bands.items()},
            "refused": list(result.refused),
        },
        f"proposed from {len(result.spreads)} cases; no matrix was changed",
        *[f"not proposed: {text}" for text in result.refused],
        shown(result.proposal),
    )


def _tell_plan(session: Session, job: CertifyJob, folder: Path) -> None:
    session.done(
        {
            "plan": str(folder.resolve()),
            "nonce": job.plan["nonce"],
            "subject": job.plan["subject"],
            "cases": [case.id for case in job.cases],
        },
        f"{shown(folder)}: a plan of {len(job.cases)} cases, the runner, and README.md, which says how to run it",
        f"what comes back is judged with: envbuild certify ... --judge {shlex.quote(shown(folder))}",
    )
