"""Programs that a finished one left running, and that hold its output open: proc(5).

Whoever reads that output waits for its end, which then does not come: a compiler server, a shell's background job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROC = Path("/proc")
POLL_SECONDS = 0.5


class Orphans:
    """Ends what holds the output of a program, or of what it ran, when that is over.

    Args:
        process: the program, with a pipe for its output.
        report: called with what is ended.
    """

    def __init__(self, process: subprocess.Popen[bytes], report: Callable[[str], None]) -> None:
        self._process = process
        # Both ends of a pipe have one name, "pipe:[INODE]": it is compared with what others hold.
        self._own = _pipe(PROC / "self/fd" / str(process.stdout.fileno())) if process.stdout else ""
        self._report = report
        self._seen: set[int] = set()
        self._ended: set[int] = set()
        self._due = time.monotonic() + POLL_SECONDS

    def are_all(self, *, anything: bool) -> bool:
        """Whether the program has ended and nothing of it is left; looks every half second, and ends what is.

        Args:
            anything: something is printed right now.
        """
        over = self._process.poll() is not None
        if not (over and not anything) and time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + POLL_SECONDS
        return not self._end(over=over) and over and not anything

    def _end(self, *, over: bool) -> bool:
        """Ask what is left to end, kill what was asked before; returns whether there was something.

        At the second look: a program that another thread is just starting has this process's files for an instant.
        """
        parents = _parents()
        program = self._process.pid
        # One that waits for the end of a pipe has no children left; while one works, what it began may be needed.
        if not over and program in parents.values():
            return False
        pipes = {self._own} | (set() if over else _pipes(program))
        left = [
            pid
            for pid in parents
            if pid not in (program, os.getpid()) and program not in _line(pid, parents) and _pipes(pid) & pipes
        ]
        for pid in self._seen.intersection(left):
            if pid not in self._ended:
                self._report(f"ended what was left running and held the output open: {_name(pid)} (process {pid})")
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if pid in self._ended else signal.SIGTERM)
            self._ended.add(pid)
        self._seen = set(left)
        return bool(left)


def _parents() -> dict[int, int]:
    """The parent of each process that is not a zombie."""
    parents = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                # The second field is the name in parentheses, which may have spaces and parentheses itself.
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                # Zombies and dead processes (proc(5)) hold no file any more.
                if state not in "ZX":
                    parents[int(folder.name)] = int(parent)
    return parents


def _line(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """A process's parent, that one's parent, and so on."""
    while (pid := parents.get(pid, 0)) > 0:
        yield pid


def _pipes(pid: int) -> set[str]:
    """The pipes that a process has open; none of one that is not ours to look at."""
    try:
        files = list((PROC / str(pid) / "fd").iterdir())
    except OSError:
        return set()
    return {name for name in map(_pipe, files) if name}


def _pipe(file: Path) -> str:
    try:
        name = str(file.readlink())
    except OSError:
        return ""
    return name if name.startswith("pipe:") else ""


def _name(pid: int) -> str:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "a program"
    return b" ".join(words).decode(errors="replace")[:200] or "a program"
