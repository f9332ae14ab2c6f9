"""A compiler that waits its turn: one queue for the compilers of all packages that are built at once.

A script by itself (standard library only): builds run it in place of gcc, g++ and nvcc, with any Python from 3.8 on::

    python jobserver.py --turns FOLDER --cores 16 --memory 64 --takes 4 -- /usr/bin/g++ -c a.cpp -o a.o

A turn is an exclusive flock on one of the core files and ``takes`` of the memory files in FOLDER. The compiler inherits
the open files, so that the kernel gives the turn back when the last process of the compile has ended, however it ended.
Commands that compile nothing (``--version``), and compilers that a compiler starts, wait for nothing.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Set for what runs in a turn: a compiler that nvcc starts has its parent's.
HELD = "ENVBUILD_COMPILER_TURN"
QUESTIONS = frozenset(
    ("--version", "-V", "--help", "-v", "-dumpversion", "-dumpfullversion", "-dumpmachine", "--dryrun")
)
SOURCES = (".cu", ".c", ".cc", ".cpp", ".cxx", ".C", ".s", ".S", ".o", ".obj", ".ptx", ".cubin", ".fatbin", ".a")
POLL_SECONDS = 0.02


def needs_turn(arguments: Sequence[str]) -> bool:
    """Whether a compiler with these arguments has work to do."""
    return not QUESTIONS.intersection(arguments) and any(
        word.endswith(SOURCES) and not word.startswith("-") for word in arguments
    )


def take_turn(folder: str, cores: int, memory: int, takes: int) -> list[int]:
    """Wait for a core and ``takes`` units of memory; returns the open files that hold them, for a child to inherit.

    Whoever waits holds the queue: turns are given in the order of coming, and a big one is not passed by for ever.
    """
    queue = _open(folder, "queue")
    fcntl.flock(queue, fcntl.LOCK_EX)
    try:
        while True:
            core = _free(folder, "core", cores, 1)
            units = _free(folder, "memory", memory, takes) if core else []
            if core and units:
                return core + units
            for descriptor in core:
                os.close(descriptor)
            time.sleep(POLL_SECONDS)
    finally:
        os.close(queue)


def _free(folder: str, kind: str, count: int, wanted: int) -> list[int]:
    """Files of a kind that nobody holds, now held here; none when there are fewer than wanted."""
    held: list[int] = []
    for number in range(count):
        descriptor = _open(folder, "%s-%d" % (kind, number))  # noqa: UP031 - as old as the rest of the script
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        held.append(descriptor)
        if len(held) == wanted:
            return held
    for descriptor in held:
        os.close(descriptor)
    return []


def _open(folder: str, name: str) -> int:
    return os.open(str(Path(folder) / name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def main(arguments: Sequence[str]) -> None:
    """Wait, then become the compiler."""
    split = list(arguments).index("--")
    own = dict(zip(arguments[:split:2], arguments[1:split:2]))  # noqa: B905 - strict is not in Python 3.8
    command = list(arguments[split + 1 :])
    if HELD not in os.environ and needs_turn(command[1:]):
        numbers = (int(own[name]) for name in ("--cores", "--memory", "--takes"))
        for descriptor in take_turn(own["--turns"], *numbers):
            os.set_inheritable(descriptor, True)
        os.environ[HELD] = "1"
    os.execv(command[0], command)  # noqa: S606 - this is the point


if __name__ == "__main__":
    main(sys.argv[1:])
