"""``envbuild bisect``."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.catalog.catalog import Selection
from envbuild.cli.command import Command
from envbuild.cli.common import Session, output_options
from envbuild.core.digests import is_digest, short
from envbuild.core.errors import ConfigurationError, UsageError
from envbuild.lock.context import run_context
from envbuild.lock.lockfile import read_lock
from envbuild.nightly.bisect.bisect import BisectRequest, bisect
from envbuild.nightly.bisect.trials import CaseTrial, ImportTrial, LockTrial
from envbuild.nightly.culprits import CERTIFIED_LOCKS


@click.command("bisect", cls=Command)
@click.argument("good")
@click.argument("bad")
@click.option("--case", metavar="ID", help="Train this certification case instead of importing the modules.")
@click.option("--matrix", metavar="NAME", help="The matrix of --case; default: the stack's own.")
@click.option("--target", metavar="NAME", help="The hardware generation, for wheels and imports.")
@click.option("--budget", metavar="MINUTES", type=click.FloatRange(min=0), help="Begin no trial after so long.")
@output_options
def command(
    session: Session,
    good: str,
    bad: str,
    case: str | None,
    matrix: str | None,
    target: str | None,
    budget: float | None,
) -> None:
    """Find the package, and for git the commit, that breaks lock BAD and not lock GOOD.

    Both are locks of one stack on one base: directories, or digests of locks that a night certified. Each trial
    installs GOOD with some packages as BAD has them, and imports the stack's modules. Results are kept: a bisection
    that was stopped goes on.
    """
    if matrix is not None and case is None:
        raise UsageError(
            "--matrix has no effect without --case",
            why="Modules are imported, and no case is trained.",
            fix="Name a case (`envbuild certify --print-cases`), or leave --matrix out.",
        )
    locks = [read_lock(_path(session, text)) for text in (good, bad)]
    # The stack and the base of either: bisect() refuses locks of two bases.
    record = locks[1].lock
    selection = session.select_to_lock(record.stack, target, record.base.name)
    request = BisectRequest(
        good=locks[0],
        bad=locks[1],
        trial=_trial(session, selection, case, matrix or selection.matrix_for(record.driver)),
        budget_seconds=None if budget is None else budget * 60,
    )
    result = bisect(request, run_context(session.context))
    session.done(result.as_json(), *result.lines())


def _path(session: Session, text: str) -> Path:
    """The directory of a lock that the command line names."""
    if not is_digest(text):
        return Path(text)
    kept = session.store.find(CERTIFIED_LOCKS, text)
    if kept is None:
        raise ConfigurationError(
            f"lock {short(text)} is not in the store",
            why="The store keeps the locks that `envbuild nightly` certified on this machine.",
            fix="Name its directory: lockfiles/STACK/BASE, or a checkout of the commit that has it.",
        )
    return kept


def _trial(session: Session, selection: Selection, case: str | None, matrix: str) -> LockTrial:
    if case is not None:
        return CaseTrial(
            selection=selection,
            case=case,
            matrix=matrix,
            wheels_for=session.built_wheels,
            context=session.context,
        )
    verifier = session.verifier(without="envbuild bisect GOOD BAD --case ID")
    # Before any trial, each of which needs such a place.
    verifier.require_place(selection)
    return ImportTrial(selection=selection, verify=verifier)
