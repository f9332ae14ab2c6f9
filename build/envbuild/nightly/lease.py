"""One night of a stack at a time: a file lock on this machine, and a lease where runners share their state.

A lease is an entry that is created and never replaced, with a number; the highest number is in force. So of two
runners that want the next number, the store lets one have it (by its conditional create; a registry has none, and there
the runner looks again after its write).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from pydantic import JsonValue

from envbuild.catalog.context import Context
from envbuild.catalog.fields import MOMENT_FORMAT, moment_of
from envbuild.core import locks
from envbuild.core.digests import digest_of, short
from envbuild.core.errors import CheckRefusedError, MachineError, NetworkError
from envbuild.core.files import machine_errors, write_atomic
from envbuild.ledger.remote import SharedState
from envbuild.store.remote import Pushed

KIND = "leases"
FILE = "lease.json"
# A night renews its lease at each step; the longest one is a certification.
LEASE = timedelta(hours=12)


@contextlib.contextmanager
def only_night(stack: str, folder: Path, context: Context) -> Iterator[None]:
    """Be the only night of a stack on this machine.

    Raises:
        MachineError: there is another one.
    """
    file, holder = folder / f"nightly-{stack}.lock", folder / f"nightly-{stack}.json"
    with machine_errors(file):
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    with locks.exclusive_if_free(file) as free:
        if not free:
            raise _running(stack, _shown(holder))
        write_atomic(holder, json.dumps({"pid": os.getpid(), "since": context.clock().strftime(MOMENT_FORMAT)}))
        yield


def is_running(stack: str, folder: Path) -> bool:
    """Whether a night of a stack runs on this machine."""
    file = folder / f"nightly-{stack}.lock"
    if not file.is_file():
        return False
    with locks.exclusive_if_free(file) as free:
        return not free


def _shown(holder: Path) -> str:
    try:
        found = json.loads(holder.read_bytes())
        return f"Process {found['pid']} of this machine has been at it since {found['since']}."
    except (OSError, ValueError, KeyError, TypeError):
        return "Another process of this machine is at it."


def _running(stack: str, why: str) -> MachineError:
    return MachineError(
        f"a nightly of stack {stack} is running already",
        why=why,
        fix="Wait for its end. Nights of other stacks may run at the same time.",
        reason="nightly-running",
    )


@dataclass
class Lease:
    """The right of one runner to be the night of a stack, in shared state."""

    state: SharedState
    stack: str
    context: Context
    number: int = 0

    def take(self) -> None:
        """Take the lease, or renew it.

        Raises:
            MachineError: another runner has it.
        """
        newest = self._newest()
        if newest > self.number:
            self._refuse_if_held(newest)
        self._write(newest + 1, until=self.context.clock() + LEASE)

    def release(self) -> None:
        """Give it back; a place that cannot be reached keeps it until it ends."""
        with contextlib.suppress(NetworkError, MachineError, CheckRefusedError):
            self._write(self.number + 1, until=self.context.clock())

    def _newest(self) -> int:
        refs = self.state.remote.list_index(KIND, (self._name,))
        return max((int(ref.index_path[1]) for ref in refs), default=0)

    def _refuse_if_held(self, number: int) -> None:
        document = self.state.remote.find(KIND, self._key(number))
        record = document.record if document is not None else None
        if not isinstance(record, dict):
            return
        until, host = str(record.get("until")), str(record.get("host"))
        # This machine's own night has ended: its file lock is held by this process.
        if host != _host() and _is_before(self.context.clock(), until):
            raise _running(self.stack, f"Runner {host} has the lease at {self.state.address} until {until}.")

    def _write(self, number: int, until: datetime) -> None:
        record: JsonValue = {"host": _host(), "until": until.strftime(MOMENT_FORMAT), "pid": os.getpid()}
        with self.state.store.staging(KIND) as folder:
            (folder / FILE).write_text(json.dumps(record))
            path = (self._name, f"{number:09d}")
            done = self.state.remote.push(KIND, self._key(number), path, folder, record)
        if done is not Pushed.NEW:
            raise _running(self.stack, f"Another runner has just taken the lease at {self.state.address}.")
        self.number = number

    @property
    def _name(self) -> str:
        # Names of stacks have dots, which parts of an index in a registry may not have.
        return short(digest_of({"stack": self.stack}))

    def _key(self, number: int) -> str:
        return digest_of({"stack": self.stack, "lease": number})


def _is_before(at: datetime, until: str) -> bool:
    try:
        return at < moment_of(until)
    except ValueError:
        return False


def _host() -> str:
    return socket.gethostname()
