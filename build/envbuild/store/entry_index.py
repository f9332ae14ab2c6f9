"""The index of an entry: size and digest of each file, by which the store notices that one was changed.

Indexed files get a fixed time. A file with its size, that time and the owner of the entry is taken as unchanged; any
other is read and compared. The index finds accidents, not deception: whoever can change a file can write an index too.
So nobody else gets a name of a file of the store: outputs are copies (:func:`~envbuild.core.files.clone_or_copy`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envbuild.core import jsonread
from envbuild.core.digests import sha256_bytes, sha256_file
from envbuild.core.errors import InternalError
from envbuild.core.files import NotPlainFileError, read_plain, refuse_no_plain

# The name is part of the store's format, from when the index was called a seal.
ENTRY_INDEX_FILE = ".sealed.json"
MOST_BYTES = 1 << 30
# 2000-01-01: no file gets it by being written to.
INDEXED_SECONDS = 946684800
# Smaller files are read every time: it costs as much as looking at their times.
ALWAYS_READ_BYTES = 64 * 1024
# Whole root file systems are not indexed: what is made from them is.
UNINDEXED_FOLDER = "rootfs"

IsKnown = Callable[[str, os.stat_result], bool]


def write_index(entry: Path) -> None:
    """Write the index of an entry: all its files but those of root file systems."""
    listed = {}
    for file in _files(entry):
        listed[file.relative_to(entry).as_posix()] = [file.stat().st_size, _digest(file)]
        if file.stat().st_mtime != INDEXED_SECONDS:  # else its time of change would move
            os.utime(file, (INDEXED_SECONDS, INDEXED_SECONDS))
    (entry / ENTRY_INDEX_FILE).write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n")


def index_with(entry: Path, files: Mapping[str, bytes]) -> bytes:
    """The content of :data:`ENTRY_INDEX_FILE` for a copy of an entry in which some files differ."""
    listed = json.loads((entry / ENTRY_INDEX_FILE).read_bytes())
    listed |= {name: [len(data), sha256_bytes(data)] for name, data in files.items()}
    return (json.dumps(listed, indent=1, sort_keys=True) + "\n").encode()


def find_damage(entry: Path, is_known: IsKnown | None = None) -> str:
    """What is wrong with an entry; empty when nothing is.

    A changed file loses the fixed time, so that every entry that shares it notices.

    Args:
        is_known: whether a large file need not be read, by its name and what stat says of it; without it that is so
            where it has its size and the fixed time.
    """
    try:
        listed = jsonread.loads(read_plain(entry / ENTRY_INDEX_FILE, MOST_BYTES))
        owner = entry.stat().st_uid
        for name, (size, digest) in listed.items():
            info = (entry / name).stat()
            refuse_no_plain(entry / name, info)
            # Of another owner: an output of an earlier version, a hard link, was given away.
            is_large = info.st_size == size and size > ALWAYS_READ_BYTES and info.st_uid == owner
            if is_large and (is_known(name, info) if is_known else info.st_mtime == INDEXED_SECONDS):
                continue
            if sha256_file(entry / name) != digest:
                # Entries share files by hard links, and so their times.
                mark_changed(entry / name)
                return f"{name} was changed"
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(str(error.filename)).name} is missing"
    except NotPlainFileError as error:
        return str(error)
    except (ValueError, TypeError, AttributeError):
        return f"{ENTRY_INDEX_FILE} cannot be read"
    return ""


def json_writer(name: str, value: object) -> Callable[[Path], None]:
    """Fills an entry with one JSON file."""

    def write(entry: Path) -> None:
        (entry / name).write_text(json.dumps(value) + "\n", encoding="utf-8")

    return write


def read_json(entry: Path, name: str) -> Any:
    """A small JSON file of an entry, as it was indexed.

    Raises:
        ValueError: it was changed, is not in the index, or is not JSON.
    """
    if problem := find_damage(entry):
        raise ValueError(problem)
    if name not in jsonread.loads(read_plain(entry / ENTRY_INDEX_FILE, MOST_BYTES)):
        raise ValueError(f"{ENTRY_INDEX_FILE} does not name {name}")
    return jsonread.loads(read_plain(entry / name, MOST_BYTES))


def mark_changed(file: Path) -> None:
    """Take the fixed time from a file that was changed, where this account may."""
    with contextlib.suppress(OSError):
        if file.stat().st_mtime == INDEXED_SECONDS:
            os.utime(file)


def is_unchanged(file: Path, size: int) -> bool:
    """Whether a file has a size and the fixed time, and is large enough that not reading it saves something."""
    info = file.stat()
    return info.st_size == size and info.st_mtime == INDEXED_SECONDS and size > ALWAYS_READ_BYTES


def _digest(file: Path) -> str:
    """The digest of a file; a blob of an OCI layout that is a link into an entry has its digest for a name."""
    if file.parent.name == "sha256" and is_unchanged(file, file.stat().st_size):
        return f"sha256:{file.name}"
    return sha256_file(file)


def _files(entry: Path) -> list[Path]:
    files = []
    for folder, folders, names in os.walk(entry):
        folders[:] = sorted(name for name in folders if name != UNINDEXED_FOLDER)
        for name in sorted(names):
            path = Path(folder) / name
            if path.is_symlink():
                raise InternalError(f"the store entry has a symbolic link: {path.relative_to(entry)}")
            if name != ENTRY_INDEX_FILE:
                files.append(path)
    return files
