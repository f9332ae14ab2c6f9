"""Where an environment is put together: on this machine, or inside a sandboxed root file system."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from envbuild.core.errors import MachineError
from envbuild.core.exit_status import describe_status, innermost_calls, shortage, tail
from envbuild.core.process import Finished


class InconclusiveError(MachineError):
    """A program did not come to its own end: what it was asked stays unknown."""


class RunCommand(Protocol):
    """Runs an argument list in a place and returns what came of it, failed or not.

    A program that runs past its time is ended with InconclusiveError.
    """

    def __call__(
        self, argv: Sequence[str], *, what: str, log: Path, timeout_seconds: float | None = None
    ) -> Finished: ...


@dataclass(frozen=True, kw_only=True)
class InstallTarget:
    """Paths as they are seen from the place, and the way to run something there.

    Attributes:
        uv: the uv program.
        lock: the folder with the lock's requirement files.
        python: the interpreter that the environment is made from.
        venv: the environment.
        run: runs something there.
        disk: a path of this machine on the disk that the environment is written to.
        logs: the folder of this machine for the log of each step.
        logs_seen: the same folder as it is seen from the place; empty where it is seen under its own name.
    """

    uv: str
    lock: str
    python: str
    venv: str
    run: RunCommand
    disk: Path
    logs: Path
    logs_seen: str = ""

    @property
    def venv_python(self) -> str:
        """The environment's own interpreter."""
        return f"{self.venv}/bin/python"


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
