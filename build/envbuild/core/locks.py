"""One builder at a time for each thing: advisory file locks (flock), released by the kernel when a process dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from envbuild.core.files import machine_errors, make_private

# Of a store.
FOLDER = "locks"
# Another account that could open a lock file could hold it.
MODE = 0o600


def exclusive(path: Path, on_wait: Callable[[], None] | None = None) -> contextlib.AbstractContextManager[None]:
    """Hold the lock file ``path``; ``on_wait`` is called once if another process holds it now."""
    return _held(path, fcntl.LOCK_EX, on_wait)


def shared(path: Path, on_wait: Callable[[], None] | None = None) -> contextlib.AbstractContextManager[None]:
    """Hold the lock file ``path`` together with others; ``on_wait`` is called once if a process holds it alone."""
    return _held(path, fcntl.LOCK_SH, on_wait)


def share_until_exit(path: Path) -> None:
    """Hold the lock file ``path`` together with others for as long as this process lives."""
    with machine_errors(path):
        descriptor = _open(path)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    _until_exit.append(descriptor)


_until_exit: list[int] = []


def release_all() -> None:
    """Release what :func:`share_until_exit` holds, for a process that runs several command lines (the tests do)."""
    while _until_exit:
        os.close(_until_exit.pop())


def _open(path: Path) -> int:
    """A lock file, made where it is missing."""
    if path.parent.name == FOLDER:
        make_private(path.parent)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    # O_CLOEXEC: a program that inherited the descriptor would hold the lock for as long as it runs.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
    info = os.fstat(descriptor)
    # One that another program made, or an older envbuild: flock(2) needs no right to write.
    if info.st_uid == os.geteuid() and stat.S_IMODE(info.st_mode) & 0o077:
        os.fchmod(descriptor, MODE)
    return descriptor


@contextlib.contextmanager
def _held(path: Path, operation: int, on_wait: Callable[[], None] | None) -> Iterator[None]:
    waited = False
    while True:
        # flock(2), not fcntl(2): its locks belong to the open file, so that threads exclude each other too, and closing
        # another descriptor of the same file releases nothing.
        with machine_errors(path):
            descriptor = _open(path)
        try:
            try:
                fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait and not waited:
                    on_wait()
                waited = True
                fcntl.flock(descriptor, operation)
            if is_file_at(descriptor, path):  # else its last holder removed it, and the next comer makes a new one
                yield
                return
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def exclusive_if_free(path: Path, *, create: bool = False) -> Iterator[bool]:
    """Hold the lock file ``path`` if no other process does; yields whether it is held now.

    Args:
        create: make it where it is missing; otherwise a missing one is not held.
    """
    try:
        with machine_errors(path) if create else contextlib.nullcontext():
            descriptor = _open(path) if create else os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield is_file_at(descriptor, path)
    finally:
        os.close(descriptor)


def close_to_readers(file: int | Path) -> None:
    """Take the right to open a file of ours from accounts that may not write it: to hold its lock they need no more."""
    info = os.stat(file)  # noqa: PTH116 - a descriptor, too
    mode = stat.S_IMODE(info.st_mode)
    readers = sum(bits for bits in (0o070, 0o007) if not mode & bits & 0o022)
    if info.st_uid == os.geteuid() and mode & readers:
        os.chmod(file, mode & ~readers)


def is_file_at(descriptor: int, path: Path) -> bool:
    """Whether a descriptor is of the file that a path names now: another process may have put one in its place."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), status)
