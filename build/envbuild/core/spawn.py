"""Starts programs, knows which run, and ends them with their children, also when this process dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Protocol

from envbuild.core.errors import MachineError
from envbuild.core.interruptions import signals_wait

KILL_GRACE_SECONDS = 3.0
# util-linux; without this a program outlives a killed envbuild and goes on writing into a staging directory.
# Popen has no option for it, and preexec_fn may deadlock in a process with threads. The signal comes when the thread
# ends that started the program (prctl(2), PR_SET_PDEATHSIG), and here threads wait for their programs.
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")


class Work(Protocol):
    """Background work, which keeps track of its programs."""

    def runs(self, process: subprocess.Popen[bytes]) -> contextlib.AbstractContextManager[None]:
        """Note a program of this work while a block runs."""


# ``work``: the background work that this thread does, if any. ``blocks``: those of `interruptible` that it works for.
thread_state = threading.local()
# What runs, each with the blocks that it was started for.
running: dict[subprocess.Popen[bytes], tuple[object, ...]] = {}


@contextlib.contextmanager
def started_program(
    command: list[str],
    what: str,
    env: Mapping[str, str] | None,
    cwd: Path | None,
    stdin: bytes | int | None,
    stderr: int = subprocess.STDOUT,
) -> Iterator[subprocess.Popen[bytes]]:
    """A running program; when the block is left by an exception, it is ended with all its children."""
    process: subprocess.Popen[bytes] | None = None
    work: Work | None = getattr(thread_state, "work", None)
    try:
        with signals_wait():
            process = _start(command, what, env, cwd, stdin, stderr)
            running[process] = getattr(thread_state, "blocks", ())
        with work.runs(process) if work is not None else contextlib.nullcontext():
            yield process
    except BaseException:
        if process is not None:
            kill_group(process)
        raise
    finally:
        if process is not None:
            running.pop(process, None)
            # Closed last: a program that is being ended may still print.
            for pipe in filter(None, (process.stdin, process.stdout)):
                pipe.close()


def _start(
    command: list[str],
    what: str,
    env: Mapping[str, str] | None,
    cwd: Path | None,
    stdin: bytes | int | None,
    stderr: int,
) -> subprocess.Popen[bytes]:
    program = shutil.which(command[0], path=(env or os.environ).get("PATH"))
    try:
        # Looked up here: setpriv would start all the same, and only its output would say what is missing.
        if program is None:
            raise FileNotFoundError(2, "no such program, or it may not be executed")
        return subprocess.Popen(
            [*_prefix(), program, *command[1:]],
            stdin=_stdin(stdin),
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            # A group of its own, for kill_group(): Ctrl-C at the terminal then reaches envbuild alone.
            start_new_session=True,
        )
    except OSError as failure:
        raise MachineError(
            f"cannot {what}: {command[0]} does not start",
            why=failure.strerror or str(failure),
            fix="Check that the program is installed and may be executed.",
        ) from failure


def _stdin(stdin: bytes | int | None) -> int:
    if stdin is None:
        return subprocess.DEVNULL
    return stdin if isinstance(stdin, int) else subprocess.PIPE


@cache
def _prefix() -> tuple[str, ...]:
    program = shutil.which(DIE_WITH_PARENT[0])
    return (program, *DIE_WITH_PARENT[1:]) if program else ()


@contextlib.contextmanager
def watched(process: subprocess.Popen[bytes], *, whole: bool) -> Iterator[None]:
    """End a program's whole group with the block, and when this process dies in it: then a pipe closes.

    The kernel's own way (PR_SET_PDEATHSIG) reaches the program alone, and none of its children.
    """
    if not whole:
        yield
        return
    # read fails at the end of its input, which comes when this process dies; a line says that all is well. A negative
    # process number is a group (kill(1)).
    script = 'read -r line || kill -s KILL -- "-$1"'
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # A session of its own: a Ctrl-C at the terminal must not end the watcher first.
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            watcher.communicate(b"\n")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a program and all its children: SIGTERM to its group, then SIGKILL, also when interrupted again."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILL_GRACE_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            # Also where the program itself has ended: a child of it may ignore SIGTERM.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
