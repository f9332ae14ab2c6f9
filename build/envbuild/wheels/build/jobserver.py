"""A compiler that waits for tokens: one pool for the compilers of all packages that are built at once.

A script by itself (standard library only): builds run it in place of gcc, g++ and nvcc, with any Python from 3.8 on::

    python jobserver.py --tokens FOLDER --cores 16 --memory 64 --needs 4 -- /usr/bin/g++ -c a.cpp -o a.o

Tokens are exclusive flocks on one of the core files and ``needs`` of the memory files in FOLDER. The compiler inherits
the open files, so the kernel gives the tokens back when the last process of the compile has ended, however it ended.
Commands that compile nothing (``--version``), and compilers that a compiler starts, wait for nothing.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Set for what runs with tokens: a compiler that nvcc starts has its parent's.
HOLDS_TOKENS = "ENVBUILD_COMPILER_TOKENS"
QUESTIONS = frozenset(
    ("--version", "-V", "--help", "-v", "-dumpversion", "-dumpfullversion", "-dumpmachine", "--dryrun")
)
SOURCES = (".cu", ".c", ".cc", ".cpp", ".cxx", ".C", ".s", ".S", ".o", ".obj", ".ptx", ".cubin", ".fatbin", ".a")
# Not GNU make's jobserver: its tokens are bytes in a pipe, which a killed compiler does not give back (GNU make
# manual, "POSIX Jobserver Interaction"), and there is one kind of them: cores, no memory.
POLL_SECONDS = 0.02


def needs_tokens(arguments: Sequence[str]) -> bool:
    """Whether a compiler with these arguments has work to do."""
    return not QUESTIONS.intersection(arguments) and any(
        word.endswith(SOURCES) and not word.startswith("-") for word in arguments
    )


def acquire_tokens(folder: str, cores: int, memory: int, needs: int) -> list[int]:
    """Wait for a core and ``needs`` units of memory; returns the open files that hold them, for a child to inherit.

    Who waits holds the queue: tokens are given in the order of asking, and a compiler that needs many is not starved.
    """
    queue = _open(folder, "queue")
    fcntl.flock(queue, fcntl.LOCK_EX)
    try:
        while True:
            core = _free(folder, "core", cores, 1)
            units = _free(folder, "memory", memory, needs) if core else []
            if core and units:
                return core + units
            for descriptor in core:
                os.close(descriptor)
            time.sleep(POLL_SECONDS)
    finally:
        os.close(queue)


def _free(folder: str, kind: str, count: int, wanted: int) -> list[int]:
    """Files of a kind that were free, now locked; none when there are fewer than wanted."""
    taken: list[int] = []
    for number in range(count):
        descriptor = _open(folder, "%s-%d" % (kind, number))  # noqa: UP031 - as old as the rest of the script
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        taken.append(descriptor)
        if len(taken) == wanted:
            return taken
    for descriptor in taken:
        os.close(descriptor)
    return []


def _open(folder: str, name: str) -> int:
    return os.open(str(Path(folder) / name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def main(arguments: Sequence[str]) -> None:
    """Wait, then become the compiler."""
    split = list(arguments).index("--")
    own = dict(zip(arguments[:split:2], arguments[1:split:2]))  # noqa: B905 - strict is not in Python 3.8
    command = list(arguments[split + 1 :])
    if HOLDS_TOKENS not in os.environ and needs_tokens(command[1:]):
        numbers = (int(own[name]) for name in ("--cores", "--memory", "--needs"))
        for descriptor in acquire_tokens(own["--tokens"], *numbers):
            os.set_inheritable(descriptor, True)
        os.environ[HOLDS_TOKENS] = "1"
    os.execv(command[0], command)  # noqa: S606 - this is the point


if __name__ == "__main__":
    main(sys.argv[1:])
