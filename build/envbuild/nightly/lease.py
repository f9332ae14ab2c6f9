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
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from pydantic import JsonValue

from envbuild.catalog.context import Context
from envbuild.catalog.fields import MOMENT_FORMAT, moment_of
from envbuild.core import locks
from envbuild.core.background import run_in_background
from envbuild.core.digests import digest_of, short
from envbuild.core.errors import CheckRefusedError, EnvbuildError, MachineError, NetworkError
from envbuild.core.files import machine_errors, write_atomic
from envbuild.ledger.remote import SharedState
from envbuild.store.remote import Pushed

KIND = "leases"
FILE = "lease.json"
# A night renews its lease at each step and, in the background, three times in its duration: so long a runner that was
# killed keeps the others from theirs.
LEASE = timedelta(minutes=30)
RENEW_SECONDS = LEASE.total_seconds() / 3


@contextlib.contextmanager
def only_night(stack: str, folder: Path, context: Context) -> Iterator[None]:
    """Be the only night of a stack on this machine.

    Raises:
        MachineError: there is another one.
    """
    # The first is locked, the second says by whom: a process that was killed leaves the text, and not the lock.
    file, holder = folder / f"nightly-{stack}.lock", folder / f"nightly-{stack}.json"
    with machine_errors(file):
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
    with locks.exclusive_if_free(file) as free:
        if not free:
            raise _running(stack, _shown(holder))
        write_atomic(holder, json.dumps({"pid": os.getpid(), "since": context.moment()}))
        yield


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
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have the lease while the block runs.

        Raises:
            MachineError: another runner has it.
        """
        self.take()
        over = threading.Event()
        keeping = run_in_background(lambda: self._keep(over))
        try:
            yield
        finally:
            over.set()
            # The thread first: a renewal after the release would take the lease again.
            keeping.result()
            self._release()

    def take(self) -> None:
        """Take the lease, or renew it.

        Raises:
            MachineError: another runner has it.
        """
        with self._one_at_a_time:
            newest = self._newest()
            # A higher number than ours is another runner's: it may have taken the lease after ours ran out.
            if newest > self.number:
                self._refuse_if_held(newest)
            self._write(newest + 1, until=self.context.clock() + LEASE)

    def _keep(self, over: threading.Event) -> None:
        while not over.wait(RENEW_SECONDS):
            # The next step tries again, and raises what it meets.
            with contextlib.suppress(EnvbuildError):
                self.take()

    def _release(self) -> None:
        """Give it back; a place that cannot be reached keeps it until it ends."""
        with contextlib.suppress(NetworkError, MachineError, CheckRefusedError):
            self._write(self.number + 1, until=self.context.clock())

    def _newest(self) -> int:
        refs = self.state.remote.list_index(KIND, (self._name,))
        return max((int(ref.index_path[1]) for ref in refs), default=0)

    def _refuse_if_held(self, number: int) -> None:
        document = self.state.remote.find(KIND, self._key(number))
        record = document.record if document is not None else None
        # What cannot be read keeps nobody out.
        if not isinstance(record, dict):
            return
        until, host = str(record.get("until")), str(record.get("host"))
        if _is_before(self.context.clock(), until) and not _has_ended(record):
            why = f"Runner {host} has the lease at {self.state.address} until {until}, and renews it while it runs."
            raise _running(self.stack, why)

    def _write(self, number: int, until: datetime) -> None:
        record: JsonValue = {"host": socket.gethostname(), "until": until.strftime(MOMENT_FORMAT), **_process()}
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


def _process() -> dict[str, JsonValue]:
    """Which process has the lease: its number counts in its machine, since its start, and in its container."""
    return {"pid": os.getpid(), "since": _started(os.getpid()), "where": _numbered_in()}


def _has_ended(record: Mapping[str, JsonValue]) -> bool:
    """Whether the process that wrote a lease is known to run no more: one of this machine and container."""
    pid, where = record.get("pid"), record.get("where")
    if not isinstance(pid, int) or not where or where != _numbered_in():
        return False
    try:
        # Signal 0 is not sent: only whether it could be is told (kill(2)).
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's, of which /proc may show nothing
    # Another process may have its number by now, and began at another time.
    return _started(pid) not in ("", record.get("since"))


def _started(pid: int) -> str:
    """When a process began, in the machine's clock ticks (proc(5), field 22 of stat); empty where there is none."""
    try:
        # Field 2, the name, may hold spaces and brackets. What follows the last one begins with field 3.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _numbered_in() -> str:
    """What numbers processes: this start of the machine, and the namespace; empty where it is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
