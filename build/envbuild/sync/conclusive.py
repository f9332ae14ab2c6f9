"""Programs of a check, whose end has to say something about what is checked.

One that ran past its time, that the kernel ended, or that had too little memory, says something about the machine:
whatever it was asked stays unknown. A slow import was once taken for one that fails, and another version was locked for
it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from envbuild.core.exit_status import describe_status, innermost_calls, shortage, tail
from envbuild.core.process import Finished
from envbuild.sync.install_target import InconclusiveError, RunCommand

# The slowest module of the shipped stacks takes 70 s from a cold disk cache on two processors; a network file system
# is many times slower, and a module that waits for something never ends.
LIMIT_SECONDS = 600.0
# The second time, alone, it may take so many times as long.
LONGER = 3
# What ends a program from outside: the kernel when memory, time or a mapped file's disk runs out, or who stops a job.
_STOPPED = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGBUS)
# Also as bubblewrap hands it on.
_STATUSES = {status: int(number) for number in _STOPPED for status in (-number, 128 + number)}
_FIX = (
    "Run again when less else runs on this machine; nothing was decided by this. If it ends like this every time, "
    "it waits for something, or needs more memory than there is: the log says where it was."
)


def run_conclusively(
    run: RunCommand, argv: Sequence[str], *, what: str, log: Path, limit_seconds: float | None = None
) -> Finished:
    """Run a program; once more with a longer limit where it was ended without a verdict.

    Raises:
        InconclusiveError: both times.
    """
    limit = LIMIT_SECONDS if limit_seconds is None else limit_seconds
    try:
        return run_once(run, argv, what=what, log=log, limit_seconds=limit)
    except InconclusiveError:
        return run_once(run, argv, what=what, log=log, limit_seconds=LONGER * limit)


def run_once(run: RunCommand, argv: Sequence[str], *, what: str, log: Path, limit_seconds: float) -> Finished:
    """Run a program within its time.

    Raises:
        InconclusiveError: it did not end in time, was killed, or failed for lack of memory, threads or time.
    """
    try:
        finished = run(argv, what=what, log=log, timeout_seconds=limit_seconds)
    except InconclusiveError as error:
        output = log.read_text(errors="replace") if log.is_file() else ""
        raise error.with_context(
            what=f"cannot {what}: it did not end within {limit_seconds:g} s", why=innermost_calls(output), fix=_FIX
        ) from None
    if finished.status in _STATUSES:
        raise InconclusiveError(
            f"cannot {what}: its process {describe_status(-_STATUSES[finished.status])}",
            why=tail(finished.output),
            fix=_FIX,
            log=log,
        )
    if finished.status != 0 and (line := shortage(finished.output)):
        raise InconclusiveError(f"cannot {what}: {line}", why=tail(finished.output), fix=_FIX, log=log)
    return finished
