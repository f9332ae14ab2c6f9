"""One night of a stack at a time where runners share their state: a lease.

It is an object that is written only while it is what was read, and that ends a while after its last writing, both by
the store's own clock: no runner's clock decides anything. A runner knows how long it has its lease for by the time that
passes, which suspending counts in.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from envbuild.catalog.context import Context
from envbuild.core import jsonread
from envbuild.core.background import run_in_background
from envbuild.core.digests import Json, canonical_json
from envbuild.core.errors import EnvbuildError, MachineError, NetworkError
from envbuild.core.interruptions import stoppable
from envbuild.core.process_identity import ProcessIdentity
from envbuild.ledger.remote import SharedState
from envbuild.nightly.alone import running
from envbuild.store.backend import Cell, StoredObject

# So long after its last renewal a lease ends; so long a runner that was killed keeps the others from theirs.
LEASE = timedelta(minutes=30)
# So far a lease may be ahead of the store's clock: a service has several machines.
AHEAD = timedelta(minutes=1)
RENEW_SECONDS, RETRY_SECONDS = 300.0, 30.0
# How often the thread that renews looks whether it is due, and whether it is done.
TICK_SECONDS, LOOK_SECONDS = 2.0, 0.1
# A lease that was renewed less long ago is only looked at before a step.
RECENT_SECONDS = 60.0
# So long before that its own runner stops, so that what it does has ended when another one begins.
MARGIN_SECONDS = 300.0
# How often a write is tried that came too late to be sure of.
ATTEMPTS = 3
LOST = "lease-lost"
NO_ANSWER = "there was no answer, or this machine was suspended."


def passed_seconds() -> float:
    """Seconds since this machine started, those in which it was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class Lease:
    """The right of one runner to be the night of a stack, in shared state."""

    state: SharedState
    stack: str
    context: Context
    _token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    _writes: int = field(default=0, repr=False)
    # By passed_seconds(): until when it holds, whatever the store answers.
    _until: float = field(default=0.0, repr=False)
    _lost: MachineError | None = field(default=None, repr=False)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have the lease while the block runs. Losing it ends the block, whatever it does.

        Raises:
            MachineError: another runner has it, or it was lost.
            NetworkError: the shared state cannot be reached.
        """
        over = threading.Event()
        try:
            self.acquire()
            with stoppable() as stop:
                renewing = run_in_background(lambda: self._keep_renewed(over, stop))
                try:
                    yield
                finally:
                    over.set()
                    renewing.result()
        except BaseException:
            if self._lost is not None:
                # Not with its interruption, which would count as the user's.
                raise self._lost from None
            raise
        finally:
            self._release()
        if self._lost is not None:
            raise self._lost

    def acquire(self) -> None:
        """Get the lease.

        Raises:
            MachineError: another runner has it.
            NetworkError: the shared state cannot be reached.
        """
        with self._one_at_a_time:
            for _ in range(ATTEMPTS):
                began = passed_seconds()
                there = self._cell.read()
                if there is not None and not self._is_own(there):
                    self._refuse_if_held(there)
                if self._write(there):
                    self._until = began + LEASE.total_seconds()
                    return
            raise self._slow()

    def confirm(self) -> None:
        """Be sure of the lease for a step; where the state cannot be reached, it is enough that it has not ended.

        Raises:
            MachineError: it was lost.
        """
        try:
            if self._until - passed_seconds() < LEASE.total_seconds() - RECENT_SECONDS:
                self.renew()
            else:
                with self._one_at_a_time:
                    self._own()
        except NetworkError as error:
            if self._left_seconds <= 0:
                raise self._loss(f"It could not be renewed: {error.what}. {error.why}") from error

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            MachineError: it was lost.
            NetworkError: the shared state cannot be reached.
        """
        with self._one_at_a_time:
            for _ in range(ATTEMPTS):
                began = passed_seconds()
                if self._write(self._own()):
                    self._until = began + LEASE.total_seconds()
                    return
            raise self._slow()

    def _keep_renewed(self, over: threading.Event, stop: Callable[[], None]) -> None:
        """Renew it until the end; stop the night where that cannot be done in time."""
        due = passed_seconds() + RENEW_SECONDS
        # Waiting does not count the time in which the machine is suspended.
        while not over.wait(min(TICK_SECONDS, RENEW_SECONDS)):
            if passed_seconds() < due and self._left_seconds > 0:
                continue
            # In a thread of its own: a store that does not answer must not hold back what happens at the end.
            renewal = run_in_background(self.renew)
            while not renewal.done() and self._left_seconds > 0:
                if over.wait(LOOK_SECONDS):
                    return
            error = renewal.exception() if renewal.done() else None
            if self._lost is None and self._left_seconds <= 0:
                cause = f"{error.what}. {error.why}" if isinstance(error, EnvbuildError) else NO_ANSWER
                self._loss(f"It could not be renewed for {LEASE.total_seconds() / 60:.0f} minutes: {cause}")
            if self._lost is not None:
                stop()
                return
            due = passed_seconds() + (RENEW_SECONDS if error is None else RETRY_SECONDS)

    def _own(self) -> StoredObject:
        """The lease as it is there.

        Raises:
            MachineError: it was lost.
        """
        if self._lost is not None:
            raise self._lost
        there = self._cell.read()
        if there is None or not self._is_own(there):
            raise self._loss(self._new_holder(there))
        return there

    @property
    def _left_seconds(self) -> float:
        """For how long this runner may go on without a renewal."""
        return self._until - MARGIN_SECONDS - passed_seconds()

    @functools.cached_property
    def _cell(self) -> Cell:
        return self.state.remote.backend.cell(f"lease-{self.stack}")

    def _release(self) -> None:
        """Give it back; a place that cannot be reached keeps it until it ends."""
        # Not waited for: a renewal that gets no answer has it.
        if self._lost is None and self._one_at_a_time.acquire(timeout=1):
            try:
                with contextlib.suppress(EnvbuildError):
                    there = self._cell.read()
                    if there is not None and self._is_own(there):
                        self._write(there, released=True)
            finally:
                self._one_at_a_time.release()

    def _write(self, there: StoredObject | None, *, released: bool = False) -> bool:
        content = self._content(released=released)
        return self._cell.create(content) if there is None else self._cell.replace(content, there)

    def _content(self, *, released: bool) -> bytes:
        self._writes += 1
        record: dict[str, Json] = {"token": self._token, "write": self._writes, "released": released}
        return canonical_json({**ProcessIdentity.own().as_json(), **record})

    def _refuse_if_held(self, there: StoredObject) -> None:
        record = _read(there)
        process = ProcessIdentity.read(record)
        if process is None or record.get("released") is True or process.has_ended:
            return
        age = self._cell.now() - there.modified
        if age > LEASE:
            return
        if age < -AHEAD:
            # The store's clock was set back. Written again as it is, the lease ends when any other does.
            self._cell.replace(there.content, there)
            age = timedelta(0)
        left, passed = math.ceil((LEASE - age).total_seconds() / 60), max(0, int(age.total_seconds() / 60))
        raise running(
            self.stack,
            f"{self._new_holder(there)} It was renewed {passed} minutes ago by the clock of the store, and ends in "
            f"{left} minutes unless it is renewed again.",
            f"If that runner is gone, run this again in {left} minutes, or {self._cell.removal}",
        )

    def _new_holder(self, there: StoredObject | None) -> str:
        if there is None:
            return f"It was removed from {self.state.address}."
        process = ProcessIdentity.read(_read(there))
        return f"The lease at {self.state.address} is held by {process or 'another runner'}."

    def _is_own(self, there: StoredObject) -> bool:
        record = _read(there)
        return record.get("token") == self._token and record.get("released") is False

    def _loss(self, why: str) -> MachineError:
        self._lost = MachineError(
            f"this runner lost its lease of stack {self.stack}",
            why=why,
            fix="Run the same command again: finished steps are not repeated. It stopped before anything else was "
            "published.",
            reason=LOST,
        )
        return self._lost

    def _slow(self) -> NetworkError:
        return NetworkError(
            f"the lease at {self.state.address} could not be written",
            why=f"Another runner changed it {ATTEMPTS} times meanwhile, or the place answers too slowly.",
            fix="Run the same command again.",
        )


def _read(there: StoredObject) -> Mapping[str, object]:
    """The record of a lease; empty if it cannot be read, so that it blocks nobody."""
    try:
        record = jsonread.foreign(there.content)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
