"""A whole night: alone for its stack, with the ledger that it shares, up to the states of its targets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.core.errors import EnvbuildError
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import NightRow, StepRow
from envbuild.ledger.remote import SharedState
from envbuild.nightly.alone import only_night
from envbuild.nightly.culprits import CulpritSearch
from envbuild.nightly.lease import Lease
from envbuild.nightly.models import NightRequest
from envbuild.nightly.nightly import Night
from envbuild.nightly.published import published_rows
from envbuild.nightly.state import TargetState, states
from envbuild.nightly.steps import NightSteps
from envbuild.publish.draft import Publishing


@dataclass(frozen=True, kw_only=True)
class NightPlaces:
    """The places of a night's ledger and locks, and its limits.

    Attributes:
        locks: the folder of the file locks that keep two nights apart.
        shared: the ledger that runners share; None: this machine's alone.
        max_age_days: after which a certified image is stale.
        bisect_seconds: for so long it is looked for what broke a target; 0: not at all.
    """

    ledger: Path
    locks: Path
    shared: SharedState | None = None
    max_age_days: float | None = None
    bisect_seconds: float = 0.0


def run_night(
    request: NightRequest, publishing: Publishing | None, places: NightPlaces, context: Context
) -> tuple[NightRow, tuple[StepRow, ...], tuple[TargetState, ...]]:
    """Run a night of a stack.

    Returns:
        The night, its steps, and the states of the stack's targets after it.

    Raises:
        MachineError: another night of the stack is running.
        NetworkError: the shared ledger cannot be reached.
    """
    steps = NightSteps(request=request, context=context, publishing=publishing).all()
    with only_night(request.stack, places.locks, context), Ledger.open(places.ledger) as ledger:
        with _shared(places.shared, request.stack, ledger, context) as renew:
            night = Night(request, steps, ledger, context, renew)
            row = night.run()
            search = CulpritSearch(
                request=request, ledger=ledger, context=context, budget_seconds=places.bisect_seconds
            )
            # Before the search: a kill during it must not lose the lock that a later night compares with.
            search.keep_locks(night.rows)
            night.rows += search.run(night.rows)
            if publishing is not None:
                _look_at_repository(publishing.to, request.stack, ledger, context)
        target_states = states(ledger, context.clock(), places.max_age_days, request.stack)
    return row, tuple(night.rows), target_states


def _look_at_repository(repository: str, stack: str, ledger: Ledger, context: Context) -> None:
    """Take over what others published or took back there."""
    try:
        ledger.record(*[row for row in published_rows(repository, context) if row.stack == stack])
    except EnvbuildError as error:
        context.reporter.note(f"note: the repository was not read: {error.what}. {error.why}")


@contextlib.contextmanager
def _shared(state: SharedState | None, stack: str, ledger: Ledger, context: Context) -> Iterator[Callable[[], None]]:
    """Hold the lease, begin with what others wrote, and end with writing what is new, also after a failure.

    Yields what renews the lease, or raises that it was lost.
    """
    if state is None:
        yield lambda: None
        return
    lease = Lease(state, stack, context)
    with lease.held():
        state.fetch(ledger)
        try:
            yield lease.confirm
        finally:
            try:
                state.push(ledger)
            except EnvbuildError as error:
                # The images are published and the ledger here has the rows: the next night sends them.
                context.reporter.note(f"the shared ledger was not written: {error.what}. {error.why}")
