"""Files that are fetched once for all processes of a store, go on where a killed one ended, and are hashed once.

A file is hashed again when its time of change (st_ctime) is another, which no program can set: size and time can be put
back. A link or another mode moves it, too; each costs one reading, which is remembered.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.digests import digest_of, sha256_file
from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.core.files import machine_errors, make_private
from envbuild.store.entry_index import INDEXED_SECONDS, mark_changed
from envbuild.store.local import WRITABLE_BY_OTHERS, LocalStore

# Writes what is at the other end to a file, or what follows its first bytes to the file's end; False: it is not there.
Download = Callable[[Path, int], bool]
PARTIAL, CHECKED = "partial", "checked"


@dataclass(frozen=True, kw_only=True)
class WantedFile:
    """A file by its digest.

    Attributes:
        kind: of the store's entries.
        name: what it is, for errors.
        where: what has it, for errors.
    """

    kind: str
    digest: str
    size_bytes: int
    name: str
    where: str


@dataclass(frozen=True)
class KeptFile:
    """A file in the store, and whether this call fetched it."""

    path: Path
    fetched: bool


def keep_file(store: LocalStore, wanted: WantedFile, download: Download) -> KeptFile:
    """The file in the store; fetched where it is not there, by one process, for which the others wait.

    Raises:
        CheckRefusedError: what came is another file, or there is none.
    """
    for _ in range(2):
        entry = store.get_or_build(wanted.kind, wanted.digest, lambda folder: _fill(store, wanted, download, folder))
        file = _place(entry.path, wanted.digest)
        if entry.built or _is_unchanged(store, wanted, file):
            store.use(wanted.kind, wanted.digest)
            return KeptFile(file, entry.built)
        # It has lost the fixed time: the store makes it anew.
    raise CheckRefusedError(
        f"{wanted.name} is refused",
        why=f"{file} in the store was changed, and is not this account's to make anew.",
        fix="Remove it, or use another store (ENVBUILD_CACHE_DIR).",
    )


def _is_unchanged(store: LocalStore, wanted: WantedFile, file: Path) -> bool:
    """Whether a file has its digest; read once for each time of change, by one process, for which the others wait."""
    if not store.is_writable:
        return True  # this account has not changed it, and could not remember that it was read

    def read(_: Path) -> None:
        if sha256_file(file) != wanted.digest:
            mark_changed(file)
            raise _ChangedError

    try:
        _note_checked(store, wanted, file, read)
    except _ChangedError:
        return False
    return True


class _ChangedError(Exception):
    pass


def _note_checked(store: LocalStore, wanted: WantedFile, file: Path, check: Callable[[Path], None]) -> None:
    with machine_errors(file, "read"):
        key = digest_of({"file": wanted.digest, "changed": str(file.stat().st_ctime_ns)})
    store.get_or_build(f"{wanted.kind}-{CHECKED}", key, check)


def _place(entry: Path, digest: str) -> Path:
    # Under its digest: with the fixed time the index of the entry takes the name for it, and does not hash it again.
    return entry / "sha256" / digest.removeprefix("sha256:")


def _fill(store: LocalStore, wanted: WantedFile, download: Download, folder: Path) -> None:
    # Not in the staging directory, which goes with its process. The entry's lock is held, so that nobody else writes.
    part = store.path_of(f"{wanted.kind}-{PARTIAL}", wanted.digest)
    with machine_errors(part):
        make_private(part.parent)
        problem = ""
        # From where a killed process ended, then from the start: what it left may be of other bytes.
        for start in dict.fromkeys((part.stat().st_size if part.is_file() else 0, 0)):
            try:
                # Nothing is asked where all is there: a range from the end on is answered with 416 (RFC 9110, 15.5.17).
                there = start >= wanted.size_bytes > 0 or download(part, start)
            except MachineError:
                part.unlink(missing_ok=True)  # of a disk that is full it may have most
                raise
            problem = _problem(part, wanted) if there else "it is gone"
            if not problem:
                final = _place(folder, wanted.digest)
                final.parent.mkdir()
                part.rename(final)
                # Both move the time of change, which stays from here on.
                final.chmod(stat.S_IMODE(final.stat().st_mode) & ~WRITABLE_BY_OTHERS)
                os.utime(final, (INDEXED_SECONDS, INDEXED_SECONDS))
                _note_checked(store, wanted, final, lambda _: None)
                return
            part.unlink(missing_ok=True)
    raise CheckRefusedError(
        f"{wanted.name} is refused",
        why=f"{wanted.where} has a damaged file as {wanted.digest}: {problem}.",
        fix="Remove it there, and publish the image again. Nothing of it was kept here.",
    )


def _problem(part: Path, wanted: WantedFile) -> str:
    # The size first: hashing many gigabytes is not worth it when the length is wrong.
    if (size := part.stat().st_size) != wanted.size_bytes:
        return f"it has {size} bytes instead of {wanted.size_bytes}"
    return "" if sha256_file(part) == wanted.digest else "its digest is another"
