"""A store for what is needed for a moment, where the system keeps temporary files; only this account enters it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from envbuild.core.errors import MachineError
from envbuild.core.files import PRIVATE, machine_errors, make_private
from envbuild.core.progress import SilentReporter
from envbuild.store.local import LocalStore

# For what is large, or outlasts a reboot (FHS 3.0, 5.15).
LARGE = Path("/var/tmp")  # noqa: S108 - a private folder in it


def temporary_store(folder: Path | None = None, *, within: Path | None = None) -> LocalStore:
    """Where things are mounted or unpacked; what a killed process left there goes at the next use.

    Args:
        folder: a directory of the caller's; a private one for each account when None.
        within: what that private one lies in; the system's temporary directory when None.

    Raises:
        MachineError: the folder is another account's.
    """
    if folder is None:
        folder = (within or Path(tempfile.gettempdir())) / f"envbuild-{os.geteuid()}"
        with machine_errors(folder):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(PRIVATE)
            # The name can be guessed, and /tmp is open to all: another account may have made it first.
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                raise MachineError(
                    f"{folder} belongs to another account",
                    why="Images are mounted and unpacked below it, so no other account may change it.",
                    fix="Have it removed, or set TMPDIR to a directory of your own.",
                )
            make_private(folder)
    return LocalStore(folder, SilentReporter())


def place_with_devices() -> Path | None:
    """A directory for temporary files on a disk where programs and device nodes work; None where there is none."""
    for place in (Path(tempfile.gettempdir()), LARGE):
        with contextlib.suppress(OSError):
            flags = os.statvfs(place).f_flag
            if os.access(place, os.W_OK | os.X_OK) and not flags & (os.ST_NODEV | os.ST_NOEXEC | os.ST_RDONLY):
                return place
    return None
