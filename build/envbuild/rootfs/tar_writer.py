"""Writes members as a tar in GNU format: for the tools that read a tar from a pipe."""

from __future__ import annotations

from typing import Protocol

from envbuild.rootfs.members import Kind, Member
from envbuild.rootfs.stream import BLOCK, Content, padding

_CODES = {Kind.FILE: b"0", Kind.HARD_LINK: b"1", Kind.SYMLINK: b"2", Kind.DIRECTORY: b"5", Kind.FIFO: b"6"}
_NAME_BYTES = 100
_OCTAL_SIZE = 8**11
_ZEROS = bytes(2 * BLOCK)
_MAGIC = b"ustar  \0"


class Sink(Protocol):
    """What a tar is written to."""

    def write(self, data: bytes | memoryview, /) -> int: ...


def write_member(sink: Sink, member: Member, content: Content | None = None) -> None:
    """Write a member, and its content if it is a file."""
    sink.write(header(member))
    if content is None:
        return
    for piece in content.pieces():
        sink.write(piece)
    sink.write(_ZEROS[: padding(content.size)])


def end(sink: Sink) -> None:
    """Write the end of the tar."""
    sink.write(_ZEROS)


def header(member: Member) -> bytes:
    """The blocks that come before a member's content."""
    name = member.name.encode("utf-8", "surrogateescape")
    link = member.link.encode("utf-8", "surrogateescape")
    before = b""
    if len(link) > _NAME_BYTES:
        before += _long(b"K", link)
    if len(name) > _NAME_BYTES:
        before += _long(b"L", name)
    code = _CODES[member.kind]
    return before + _block(name, member.mode, member.uid, member.gid, member.size, member.mtime, code, link)


def _long(code: bytes, text: bytes) -> bytes:
    data = text + b"\0"
    return _block(b"././@LongLink", 0, 0, 0, len(data), 0, code, b"") + data + _ZEROS[: padding(len(data))]


def _block(name: bytes, mode: int, uid: int, gid: int, size: int, mtime: int, code: bytes, link: bytes) -> bytes:
    before = b"%b%07o\0%b%b%b%011o\0" % (
        name[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"),
        mode,
        _number(uid, 8),
        _number(gid, 8),
        _number(size, 12),
        mtime,
    )
    behind = b"%b%b%b" % (code, link[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"), _MAGIC)
    total = sum(before) + sum(behind) + 8 * 32  # the checksum counts as eight spaces
    return b"%b%06o\0 %b" % (before, total, behind) + _ZEROS[: BLOCK - len(before) - len(behind) - 8]


def _number(value: int, length: int) -> bytes:
    """Octal digits, or binary where those are too few (GNU)."""
    if 0 <= value < 8 ** (length - 1):
        return b"%0*o\0" % (length - 1, value)
    return b"\x80" + value.to_bytes(length - 1, "big")
