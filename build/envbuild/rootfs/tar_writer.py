"""Writes members as a tar in GNU format: for the tools that read a tar from a pipe."""

from __future__ import annotations

import tarfile
from typing import Protocol

from envbuild.rootfs.members import Kind, Member
from envbuild.rootfs.stream import BLOCK, Content

# No devices: those in dev are left out where layers are merged, and others refuse the layer (LayerView).
_TYPES = {
    Kind.FILE: tarfile.REGTYPE,
    Kind.HARD_LINK: tarfile.LNKTYPE,
    Kind.SYMLINK: tarfile.SYMTYPE,
    Kind.DIRECTORY: tarfile.DIRTYPE,
    Kind.FIFO: tarfile.FIFOTYPE,
}


class Sink(Protocol):
    """What a tar is written to."""

    def write(self, data: bytes | memoryview, /) -> int: ...


def write_member(sink: Sink, member: Member, content: Content | None = None) -> None:
    """Write a member, and its content if it is a file."""
    # Headers only: a TarFile keeps every member in memory, which an image with 400,000 files has no use for.
    header = tarfile.TarInfo(member.name)
    header.type, header.linkname, header.size = _TYPES[member.kind], member.link, member.size
    header.mode, header.uid, header.gid, header.mtime = member.mode, member.uid, member.gid, member.mtime
    sink.write(header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
    if content is None:
        return
    for piece in content.pieces():
        sink.write(piece)
    sink.write(bytes(-content.size % BLOCK))


def end(sink: Sink) -> None:
    """Write the end of the tar: two blocks of zeros (POSIX, pax, "ustar Interchange Format")."""
    sink.write(bytes(2 * BLOCK))
