"""Standard output: where a command's result goes. Reports in one way that it cannot be written."""

from __future__ import annotations

import errno
import os
import sys
from typing import TextIO


def put(text: str) -> None:
    """Write a result to standard output, at once.

    Raises:
        MachineError: it cannot be written.
        BrokenPipeError: its reader left.
    """
    try:
        sys.stdout.write(text)
        # At once: what is left in the buffer would fail at exit, after the exit code was decided.
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        from envbuild.core.errors import MachineError

        discard(sys.stdout)
        raise MachineError(
            "standard output cannot be written",
            why="It is closed, or not open for writing."
            if error.errno == errno.EBADF
            else error.strerror or str(error),
            fix="The result was not shown. Send it to a file on a disk with space, to a pipe or to /dev/null, and run "
            "the same command again: finished work is kept.",
        ) from error


def discard(stream: TextIO) -> None:
    """Let what a stream still holds, and all that comes, go nowhere: Python would complain about it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def open_closed_streams() -> None:
    """Give a process that was started with closed streams (``>&-``) streams all the same, and keep their numbers taken.

    What goes to a closed stderr is lost. A result may not be: writing to a closed stdout fails, as it should.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            access = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            descriptor = os.open(os.devnull, access)  # the lowest number that is free
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - open as long as the process lives
