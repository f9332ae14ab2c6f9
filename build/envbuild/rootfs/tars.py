"""Archives of images: tars whose members are documents and layers, plain or compressed, read by their names."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from envbuild.core.errors import CheckRefusedError
from envbuild.rootfs.blobs import most_bytes
from envbuild.rootfs.members import Refusal
from envbuild.rootfs.tar_header import Archive, TarHeader, read_header

MOST_MEMBERS = 100_000
# Of all members: their names are kept.
MOST_HEADER_BYTES = 64 << 20
# What reading a tar ends with where it, or what it is compressed with, is damaged.
DAMAGE = (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, RecursionError, Refusal)


class _Archive(tarfile.TarFile):
    """A tar of others (:class:`envbuild.rootfs.tar_header.Archive`)."""

    tarinfo = TarHeader
    header_bytes = records = 0
    firstmember: TarHeader | None

    def next(self) -> TarHeader | None:
        """The next member; tarfile's own takes a damaged header for the end."""
        # TarFile.__init__ reads the first member already, and keeps it there (CPython, Lib/tarfile.py).
        if self.firstmember is not None:
            member, self.firstmember = self.firstmember, None
            return member
        self.header_bytes = 0
        # A member that is cut off.
        if self.fileobj.tell() < self.offset:
            self.fileobj.seek(self.offset - 1)
            if not self.fileobj.read(1):
                raise tarfile.ReadError("unexpected end of data")
        try:
            return read_header(cast("Archive", self))
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError) as error:  # type: ignore[attr-defined]
            if not self.offset:
                raise tarfile.ReadError(str(error)) from None
            return None
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def open_archive(file: Path) -> tuple[tarfile.TarFile, dict[str, tarfile.TarInfo]]:
    """A tar of others, plain or compressed, and its members by their names.

    Raises:
        tarfile.TarError: it is not a tar, or has more members than an image's archive has; one of :data:`DAMAGE`.
    """
    try:
        tar = _Archive.open(file, "r:*")
    except tarfile.ReadError as error:
        raise tarfile.ReadError("It is not a tar, plain or compressed with gzip, bzip2 or xz.") from error
    limit = most_bytes(file.stat().st_size)
    members: dict[str, tarfile.TarInfo] = {}
    count = header_bytes = end = 0
    try:
        while (member := tar.next()) is not None:
            count += 1
            if count > MOST_MEMBERS:
                raise tarfile.ReadError(f"It has more than {MOST_MEMBERS} members, which no image's archive has.")
            header_bytes, end = header_bytes + member.offset_data - end, tar.offset
            if header_bytes > MOST_HEADER_BYTES:
                raise tarfile.ReadError(f"The headers of its members have more than {MOST_HEADER_BYTES >> 20} MiB.")
            # Before what it holds is passed over, or written anywhere.
            if member.offset_data + member.size > limit:
                raise tarfile.ReadError(f"It unpacks to more than {limit} bytes: nothing honest is packed so densely.")
            members[member.name.removeprefix("./")] = member
    except BaseException:
        tar.close()
        raise
    return tar, members


@contextlib.contextmanager
def damage_refused(refuse: Callable[[str], CheckRefusedError]) -> Iterator[None]:
    """Around the reading of an archive and of its members' content: an error for what the readers report of damage.

    Raises:
        CheckRefusedError: the file is damaged.
    """
    try:
        yield
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # bz2's for damage has none
            raise
        raise refuse(str(error)) from error
