"""The members of an sdist or a wheel."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial

# What the readers raise for bytes that are not an archive.
NOT_AN_ARCHIVE = (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError)


def archive_members(content: bytes) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The files of a .zip or .tar.gz, each with what reads it for as long as it is the last one."""
    if content[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield from ((member, partial(archive.read, member)) for member in archive.namelist())
        return
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:*") as tar:
        yield from ((entry.name, partial(_extracted, tar, entry)) for entry in tar if entry.isfile())


def _extracted(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(entry)
    return stream.read() if stream else b""
