"""Headers of tars from others: Python's tarfile reads them, within limits and by one meaning.

tarfile alone would take memory and time without end (PAX headers, maps of sparse files, a call within a call for every
long name), read a malformed number as 0, carry a global header to every member, and end without an error at a
damaged header (CPython: ``TarFile.next``). So PAX records are read here, and the rest is bounded. Sparse files are
refused: no builder of images writes them, and their headers can state any size.
"""

from __future__ import annotations

import tarfile
from typing import BinaryIO, Protocol, cast

from envbuild.rootfs.members import Refusal
from envbuild.rootfs.stream import BLOCK, Stream

# Long names and PAX headers of one member are kept in memory; no real ones come near.
MAX_HEADER_BYTES = 4 << 20
# tarfile calls itself for each of them: a member has 64 at most, real ones have one to three.
_LEAST_HEADER_BYTES = MAX_HEADER_BYTES // 64
# Of a whole layer. A member takes time however small it is, and so does a record: real ones have one to four.
MAX_MEMBERS = 3_000_000
MAX_RECORDS = 4 * MAX_MEMBERS
_USTAR = b"ustar\0"


class Archive(Protocol):
    """What a header uses of a :class:`tarfile.TarFile`.

    Attributes:
        offset: where the next header is.
        header_bytes: of the long names and PAX headers of the member that is being read; ``records``: of all members.
    """

    @property
    def fileobj(self) -> Stream | BinaryIO: ...

    offset: int
    header_bytes: int
    records: int


# tarfile has no public way to read a header from a stream within limits. CPython 3.10 to 3.13 call _proc_member for
# each header (TarInfo.fromtarfile), and _proc_pax for those with PAX records.
class TarHeader(tarfile.TarInfo):
    """A member's header.

    Attributes:
        records: PAX records before it.
    """

    __slots__ = ("records",)
    records: dict[str, bytes]

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str | None, errors: str) -> TarHeader:
        """Read a block. tarfile also takes times of GNU's format (bytes 345 and on) for the beginning of a name."""
        header = super().frombuf(buf, encoding or "utf-8", errors)
        if buf[257:263] != _USTAR:
            header.name = buf[:100].split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
        header.records = {}
        return header

    def _proc_member(self, archive: Archive) -> TarHeader:
        if self.size < 0:
            raise Refusal(self.name, "Its size is negative.")
        if self.type in b"LKxXg":
            archive.header_bytes += max(self.size, _LEAST_HEADER_BYTES)
            if archive.header_bytes > MAX_HEADER_BYTES:
                raise Refusal(
                    "", f"The long names and PAX headers of a member have more than {MAX_HEADER_BYTES} bytes."
                )
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise _sparse(self.name)
        if self.type == tarfile.XGLTYPE:
            # A header for all that follow describes the archive; docker passes over it too.
            archive.fileobj.read(_padded(self.size))
            return read_header(archive)
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]

    def _proc_pax(self, archive: Archive) -> TarHeader:
        data = archive.fileobj.read(_padded(self.size))[: self.size]
        records = _read_records(data, archive)
        header = read_header(archive)
        header._apply(records, archive)
        return header

    def _apply(self, records: dict[str, bytes], archive: Archive) -> None:
        self.records = {**self.records, **records}
        if any(key.startswith("GNU.sparse.") for key in records):
            raise _sparse(self.name)
        if name := records.get("path"):
            self.name = text(name)
        if link := records.get("linkpath"):
            self.linkname = text(link)
        for field in ("uid", "gid"):
            if field in records:
                setattr(self, field, decimal(records[field], self.name))
        if "mtime" in records:
            # POSIX pax: decimal, with fractions, before 1970 negative. A layer has whole seconds from 1970 on.
            seconds = records["mtime"].split(b".", 1)[0]
            self.mtime = -1 if seconds.startswith(b"-") else decimal(seconds, self.name)
        if self.isreg() and "size" in records:
            # For sizes that the header's eleven octal digits cannot hold (8 GiB); tarfile took the next header's place
            # from those.
            self.size = decimal(records["size"], self.name)
            archive.offset = self.offset_data + _padded(self.size)


def read_header(archive: Archive) -> TarHeader:
    """The next member's header, after those that describe it.

    Raises:
        Refusal: it is damaged, or over a limit; tarfile's HeaderError.
    """
    return TarHeader.fromtarfile(cast("tarfile.TarFile", archive))


def _padded(size: int) -> int:
    return size + -size % BLOCK


def _sparse(name: str) -> Refusal:
    return Refusal(
        name, "It is a sparse file.", "Write the tar anew without tar's option --sparse, or use another image."
    )


def decimal(digits: bytes, name: str) -> int:
    """A number of a PAX record."""
    # int() alone takes signs, blanks and underscores, and long for very many digits. 64 bits are 20 digits.
    if not digits.isdigit() or len(digits) > 20:
        raise Refusal(name, f"A number was expected and {digits[:40]!r} found.")
    return int(digits)


def text(raw: bytes) -> str:
    """Bytes of a name as a string."""
    return raw.decode("utf-8", "surrogateescape")


def _read_records(data: bytes, archive: Archive) -> dict[str, bytes]:
    """PAX records, ``LENGTH KEY=VALUE\\n``."""
    records: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        digits = data[at : at + 20].split(b" ", 1)[0]
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = data[at + len(digits) + 1 : at + length - 1].partition(b"=")
        # The shortest record is "5 a=\n" without a value: digits, blank, one letter, "=" and the line's end.
        if length < len(digits) + 4 or data[at + length - 1 : at + length] != b"\n" or not equals:
            raise Refusal("", "A PAX header is damaged.")
        archive.records += 1
        records[text(key)] = value
        at += length
    if archive.records > MAX_RECORDS:
        raise Refusal("", f"It has more than {MAX_RECORDS} PAX records.", "Do not use the image: no layer has as many.")
    return records
