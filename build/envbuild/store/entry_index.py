"""Seals: how the store notices that an entry was changed after it was made.

Sealing writes size and digest of each file beside them and gives the files a fixed time. A file with its size and that
time is taken as untouched; any other is read and compared. Outputs are hard links into the store, so a change made
there is a change made here. A seal finds accidents; whoever wants to deceive can write a seal too.
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

SEAL_FILE = ".sealed.json"
MOST_BYTES = 1 << 30
# 2000-01-01: no file gets it by being written to.
SEALED_SECONDS = 946684800
# Smaller files are read every time: it costs as much as looking at their times.
ALWAYS_READ_BYTES = 64 * 1024
# Whole root file systems are not sealed: what is made from them is.
UNSEALED_FOLDER = "rootfs"

IsKnown = Callable[[str, os.stat_result], bool]


def seal(entry: Path) -> None:
    """Seal every file of an entry, but those of root file systems."""
    listed = {}
    for file in _files(entry):
        listed[file.relative_to(entry).as_posix()] = [file.stat().st_size, _digest(file)]
        os.utime(file, (SEALED_SECONDS, SEALED_SECONDS))
    (entry / SEAL_FILE).write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n")


def seal_with(entry: Path, files: Mapping[str, bytes]) -> bytes:
    """The seal of a copy of a sealed entry in which some files are others: the bytes for its :data:`SEAL_FILE`."""
    listed = json.loads((entry / SEAL_FILE).read_bytes())
    listed |= {name: [len(data), sha256_bytes(data)] for name, data in files.items()}
    return (json.dumps(listed, indent=1, sort_keys=True) + "\n").encode()


def broken(entry: Path, is_known: IsKnown | None = None) -> str:
    """What is wrong with a sealed entry, in words; empty when nothing is.

    A file that was changed loses the time of sealed files, so that everybody who shares it sees it too.

    Args:
        is_known: whether a large file need not be read, by its name and what stat says of it; without it that is so
            where it has its size and the time of sealed files.
    """
    try:
        listed = jsonread.loads(read_plain(entry / SEAL_FILE, MOST_BYTES))
        for name, (size, digest) in listed.items():
            info = (entry / name).stat()
            refuse_no_plain(entry / name, info)
            is_large = info.st_size == size and size > ALWAYS_READ_BYTES
            if is_large and (is_known(name, info) if is_known else info.st_mtime == SEALED_SECONDS):
                continue
            if sha256_file(entry / name) != digest:
                unmask(entry / name)
                return f"{name} was changed"
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(str(error.filename)).name} is missing"
    except NotPlainFileError as error:
        return str(error)
    except (ValueError, TypeError, AttributeError):
        return f"{SEAL_FILE} cannot be read"
    return ""


def read_json(entry: Path, name: str) -> Any:
    """A small JSON file of a sealed entry, as it was sealed.

    Raises:
        ValueError: it was changed, is not covered by the seal, or is no JSON; says which.
    """
    if problem := broken(entry):
        raise ValueError(problem)
    if name not in jsonread.loads(read_plain(entry / SEAL_FILE, MOST_BYTES)):
        raise ValueError(f"{SEAL_FILE} does not name {name}")
    return jsonread.loads(read_plain(entry / name, MOST_BYTES))


def unmask(file: Path) -> None:
    """Take the time of sealed files from a file that is not the one that was sealed, where this account may."""
    with contextlib.suppress(OSError):
        if file.stat().st_mtime == SEALED_SECONDS:
            os.utime(file)


def is_untouched(file: Path, size: int) -> bool:
    """Whether a file has a size and the time of sealed files, and is large enough for that to save something."""
    info = file.stat()
    return info.st_size == size and info.st_mtime == SEALED_SECONDS and size > ALWAYS_READ_BYTES


def _digest(file: Path) -> str:
    """The digest of a file; a blob of an OCI layout that is a link into a sealed entry has its digest for a name."""
    if file.parent.name == "sha256" and is_untouched(file, file.stat().st_size):
        return f"sha256:{file.name}"
    return sha256_file(file)


def _files(entry: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(entry):
        folders[:] = sorted(name for name in folders if name != UNSEALED_FOLDER)
        for name in sorted(names):
            path = Path(folder) / name
            if path.is_symlink():
                raise InternalError(f"the store entry has a symbolic link: {path.relative_to(entry)}")
            if name != SEAL_FILE:
                found.append(path)
    return found
