"""The members of a tar, read in one pass: ustar, GNU and PAX, names in any bytes."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping

from envbuild.rootfs import tar_header
from envbuild.rootfs.members import Kind, Member, Refusal, tidy_name
from envbuild.rootfs.stream import Content, Stream
from envbuild.rootfs.tar_header import TarHeader, read_header

# Owners are 32 bits (chown(2)).
MAX_OWNER = (1 << 32) - 1
# What a squashfs can hold.
MAX_TIME = (1 << 32) - 1
_KINDS = {
    tarfile.REGTYPE: Kind.FILE,
    tarfile.AREGTYPE: Kind.FILE,
    tarfile.CONTTYPE: Kind.FILE,  # contiguous, which means nothing today
    tarfile.LNKTYPE: Kind.HARD_LINK,
    tarfile.SYMTYPE: Kind.SYMLINK,
    tarfile.CHRTYPE: Kind.CHARACTER,
    tarfile.BLKTYPE: Kind.BLOCK,
    tarfile.DIRTYPE: Kind.DIRECTORY,
    tarfile.FIFOTYPE: Kind.FIFO,
}
# As docker and GNU tar write them into PAX headers.
_XATTR = "SCHILY.xattr."


class _LayerTar(Stream):
    """A layer's tar as headers are read from it (:class:`envbuild.rootfs.tar_header.Archive`)."""

    # TarInfo._proc_builtin reads all three of its archive. Global headers are passed over, so the last stays empty.
    encoding, errors = "utf-8", "surrogateescape"
    pax_headers: Mapping[str, str] = {}

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__(pieces)
        self.fileobj: Stream = self
        self.offset = self.header_bytes = self.records = 0

    def header(self) -> TarHeader | None:
        """The next member's header; None at the end."""
        self.skip_to(self.offset)
        self.header_bytes = 0
        if self.at_end():
            return None
        try:
            return read_header(self)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            return None
        except tarfile.HeaderError as error:
            raise Refusal("", f"A tar header is damaged: {error}.") from None


def read_tar(pieces: Iterator[bytes]) -> Iterator[tuple[Member, Content | None]]:
    """The members in their order, a file's with its content; all of the stream is read in the end.

    Raises:
        Refusal: the tar is damaged, or has something that no layer has.
    """
    tar = _LayerTar(pieces)
    members = 0
    while (header := tar.header()) is not None:
        members += 1
        if members > tar_header.MAX_MEMBERS:
            raise Refusal("", f"It has more than {tar_header.MAX_MEMBERS} members.", "Do not use the image.")
        member = _member(header)
        if member.kind is not Kind.FILE:
            tar.offset = tar.tell()  # a directory in the form of before 1988 may have a size
            yield member, None
            continue
        yield member, Content(member.size, tar.pieces(header.size))
    tar.drain()


def _member(header: TarHeader) -> Member:
    name = tidy_name(header.name)
    kind = _kind(header, name)
    if not (0 <= header.uid <= MAX_OWNER and 0 <= header.gid <= MAX_OWNER):
        raise Refusal(name, f"Its owner {header.uid} or group {header.gid} is out of range: owners have 32 bits.")
    member = Member(
        name,
        kind,
        header.mode & 0o7777,
        header.uid,
        header.gid,
        min(max(int(header.mtime), 0), MAX_TIME),
        header.size if kind is Kind.FILE else 0,
    )
    if header.records:
        member.xattrs = tuple(sorted(key[len(_XATTR) :] for key in header.records if key.startswith(_XATTR)))
    if kind is Kind.SYMLINK or kind is Kind.HARD_LINK:
        member.link = header.linkname
        _check_link(member)
    return member


def _kind(header: TarHeader, name: str) -> Kind:
    kind = _KINDS.get(header.type)
    if kind is None:
        raise Refusal(name, f"Its type is {header.type!r}; layers hold files, directories, links, FIFOs and devices.")
    if header.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and header.name.endswith("/"):
        kind = Kind.DIRECTORY  # as tars from before 1988 have them
    if not name and kind is not Kind.DIRECTORY:
        raise Refusal(header.name or "''", f"A {kind.value} has no name.")
    return kind


def _check_link(member: Member) -> None:
    if not member.link or "\0" in member.link:
        raise Refusal(member.name, f"The {member.kind.value} leads to an empty name, or to one with a NUL byte.")
    if len(member.link) > 4095:
        raise Refusal(member.name, f"The {member.kind.value} leads to a name of more than 4095 bytes.")
