"""``envbuild bisect``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.catalog.catalog import Selection
from envbuild.cli.common import Session, as_command
from envbuild.cli.options import argument, no_effect, option
from envbuild.core.digests import is_digest, short
from envbuild.core.errors import ConfigurationError
from envbuild.lock.context import run_context
from envbuild.lock.lockfile import read_lock
from envbuild.nightly.bisect.bisect import BisectRequest, bisect
from envbuild.nightly.bisect.trials import CaseTrial, ImportTrial, LockTrial
from envbuild.nightly.culprits import CERTIFIED_LOCKS


@dataclass(frozen=True, kw_only=True)
class BisectOptions:
    good: str = argument()
    bad: str = argument()
    case: str | None = option("--case ID", "Train this certification case instead of importing the modules.")
    matrix: str | None = option("--matrix NAME", "The matrix of --case; default: the stack's own.")
    target: str | None = option("--target NAME", "The hardware generation, for wheels and imports.")
    budget: float | None = option(
        "--budget MINUTES", "Start no trial after this many minutes.", type=click.FloatRange(min=0)
    )


@as_command("bisect", BisectOptions)
def command(session: Session, options: BisectOptions) -> None:
    """Find the package, or its git commit, that breaks lock BAD but not lock GOOD.

    Both are locks of one stack on one base: directories, or digests of locks that a night certified. Each trial
    installs GOOD with some of BAD's packages, and imports the stack's modules. Results are kept, so a stopped
    bisection can be continued.
    """
    if options.matrix is not None and options.case is None:
        instead = "Name a case (`envbuild certify --print-cases`)"
        raise no_effect("--matrix", "without --case", "Modules are imported, and no case is trained.", instead)
    good, bad = (read_lock(_path(session, text)) for text in (options.good, options.bad))
    # The stack and the base of either: bisect() refuses locks of two bases.
    record = bad.lock
    selection = session.select_to_lock(record.stack, options.target, record.base.name)
    request = BisectRequest(
        good=good,
        bad=bad,
        trial=_trial(session, selection, options.case, options.matrix or selection.matrix_for(record.driver)),
        budget_seconds=None if options.budget is None else options.budget * 60,
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
