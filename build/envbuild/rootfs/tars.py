"""Reading and writing tars: GNU format, names in any bytes, in the order in which members come."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from envbuild.core.errors import CheckRefusedError
from envbuild.rootfs.blobs import most_bytes

COPY_BYTES = 1 << 20
MOST_MEMBERS = 100_000
MOST_HEADER_BYTES = 16 << 20
# Members that say something of the next one (pax(1), and GNU's for long names).
_HEADERS = (b"x", b"g", b"X", b"L", b"K")
# What reading a tar ends with where it, or what it is compressed with, is damaged.
DAMAGE = (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, RecursionError)


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


class _Bounded(tarfile.TarInfo):
    """What takes memory or time without end in tarfile is refused: long names, PAX headers, maps of sparse files.

    No archive of an image has sparse files: its members are documents and layers.
    """

    def _proc_member(self, archive: _Archive) -> tarfile.TarInfo:
        if self.size < 0 or self.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(f"{self.name!r} is sparse, or has a negative size.")
        if self.type in _HEADERS:
            archive.header_bytes += max(self.size, tarfile.BLOCKSIZE)
            if archive.header_bytes > MOST_HEADER_BYTES:
                raise tarfile.ReadError(f"Its long names and PAX headers have more than {MOST_HEADER_BYTES >> 20} MiB.")
        found: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return found

    def _refuse_sparse(self, *_: object) -> None:
        raise tarfile.ReadError("A member is sparse.")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


class _Archive(tarfile.TarFile):
    """A tar of others. ``header_bytes``: what was read so far of long names and PAX headers."""

    tarinfo = _Bounded
    header_bytes = 0


def open_archive(file: Path) -> tuple[tarfile.TarFile, dict[str, tarfile.TarInfo]]:
    """A tar of others, plain or compressed, and its members by their names.

    Raises:
        tarfile.TarError: it is none, or has more members than an image's archive has; one of :data:`DAMAGE`.
    """
    try:
        tar = _Archive.open(file, "r:*")
    except tarfile.ReadError as error:
        raise tarfile.ReadError("It is no tar, plain or compressed with gzip, bzip2 or xz.") from error
    limit = most_bytes(file.stat().st_size)
    members: dict[str, tarfile.TarInfo] = {}
    count = 0
    try:
        while (member := tar.next()) is not None:
            count += 1
            if count > MOST_MEMBERS:
                raise tarfile.ReadError(f"It has more than {MOST_MEMBERS} members: it is no image's archive.")
            # Before what it holds is passed over, or written anywhere.
            if member.offset_data + member.size > limit:
                raise tarfile.ReadError(f"It unpacks to more than {limit} bytes: nothing honest is packed so densely.")
            members[member.name.removeprefix("./")] = member
    except BaseException:
        tar.close()
        raise
    return tar, members


@contextlib.contextmanager
def damage_refused(
    archive: Path, fix: str = "", refuse: Callable[[str], CheckRefusedError] | None = None
) -> Iterator[None]:
    """Around the reading of ``archive`` and of its members' content: what the readers say of damage, in our words.

    Raises:
        CheckRefusedError: the file is damaged.
    """
    try:
        yield
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # bz2's for damage has none
            raise
        if refuse:
            raise refuse(str(error)) from error
        raise CheckRefusedError(
            f"{archive} is damaged",
            why=str(error),
            fix=fix or f"Remove {archive.parent} and run the same command again.",
        ) from error
