"""Real processes for tests: forks that do one thing, and a look at who is alive."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

NOBODY = 65534


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait for a condition; fail when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


@contextlib.contextmanager
def forked(action: Callable[[], object]) -> Iterator[int]:
    """Run ``action`` in a child process while the block runs; the child is killed and reaped at its end."""
    pid = _fork(action)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def in_child(action: Callable[[], object]) -> int:
    """Run ``action`` in a child process to its end; its status as :mod:`subprocess` counts (negative: a signal)."""
    return os.waitstatus_to_exitcode(os.waitpid(_fork(action), 0)[1])


def unprivileged(action: Callable[[], object]) -> int:
    """Like :func:`in_child`, without root's power to go past permissions; tests may run as root."""

    def without_root() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        action()

    return in_child(without_root)


def _fork(action: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        action()
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    os._exit(0)
