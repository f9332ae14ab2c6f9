"""Reading and writing tars: GNU format, names in any bytes, in the order in which members come."""

from __future__ import annotations

import contextlib
import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from envbuild.core.errors import CheckRefusedError

COPY_BYTES = 1 << 20


class Sink(Protocol):
    """What a tar is written to."""

    def write(self, data: bytes, /) -> int: ...


class _Counted:
    """A sink that knows its position, which tarfile asks for."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._position = 0

    def write(self, data: bytes) -> int:
        self._position += len(data)
        return self._sink.write(data)

    def tell(self) -> int:
        return self._position


class TarWriter:
    """Writes members one after the other; call :meth:`close` at the end."""

    def __init__(self, sink: Sink) -> None:
        # Surrogates carry names that are no UTF-8 through Python's strings and back.
        self._tar = tarfile.TarFile(
            fileobj=cast("BinaryIO", _Counted(sink)),
            mode="w",
            format=tarfile.GNU_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
            copybufsize=COPY_BYTES,
        )

    def add(self, member: tarfile.TarInfo, content: BinaryIO | None = None) -> None:
        """Write a member and its content."""
        self._tar.addfile(member, content)
        # tarfile remembers every member for reading back, which nobody does here.
        self._tar.members = []  # type: ignore[attr-defined]

    def close(self) -> None:
        """Write the end of the archive."""
        self._tar.close()


def read_members(archive: Path) -> Iterator[tuple[tarfile.TarInfo, BinaryIO | None]]:
    """The members of a tar, gzipped or not, in their order; for files also their content, to be read at once."""
    with tarfile.open(archive, "r:*", encoding="utf-8", errors="surrogateescape") as tar:
        while (member := tar.next()) is not None:
            yield member, cast("BinaryIO", tar.extractfile(member)) if member.isreg() else None
            tar.members = []  # type: ignore[attr-defined]
        # The checksum is behind the last member, and gzip compares it only when it gets there.
        while tar.fileobj is not None and tar.fileobj.read(COPY_BYTES):
            pass


@contextlib.contextmanager
def damage_refused(archive: Path, fix: str = "") -> Iterator[None]:
    """Around the reading of ``archive`` and of its members' content: what the readers say of damage, in our words.

    Raises:
        CheckRefusedError: the file is damaged.
    """
    try:
        yield
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CheckRefusedError(
            f"{archive} is damaged",
            why=str(error),
            fix=fix or f"Remove {archive.parent} and run the same command again.",
        ) from error
