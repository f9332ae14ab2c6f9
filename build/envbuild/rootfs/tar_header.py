"""Headers of tars from others: Python's tarfile reads them, within limits and by one meaning.

tarfile alone would take memory and time without end (PAX headers, maps of sparse files, a call within a call for every
long name), read a malformed number as 0, carry a global header to every member, and end without an error at a
damaged header (CPython: ``TarFile.next``). So PAX records are read here, and the rest is bounded.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from typing import BinaryIO, Protocol, cast

from envbuild.rootfs.members import Refusal
from envbuild.rootfs.sparse import Segment, check, decimal, pax_map
from envbuild.rootfs.stream import BLOCK, Stream

# Long names and PAX headers of one member are kept in memory; no real ones come near.
MAX_HEADER_BYTES = 4 << 20
# tarfile calls itself for each of them: a member has 64 at most, real ones have one to three.
_LEAST_HEADER_BYTES = MAX_HEADER_BYTES // 64
# Of a whole layer. A member takes time however small it is, and so does a record: real ones have one to four.
MAX_MEMBERS = 3_000_000
MAX_RECORDS = 4 * MAX_MEMBERS
_USTAR = b"ustar\0"
_PAIRS = ("GNU.sparse.offset", "GNU.sparse.numbytes")


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
        stored: bytes of its content in the tar; ``size`` is that of the file, holes of a sparse one included.
        records: PAX records before it.
    """

    __slots__ = ("records", "stored")
    records: dict[str, bytes]
    stored: int
    # What typeshed has here is another thing's type.
    sparse: list[Segment] | None  # type: ignore[assignment]

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
        self.stored = self.size
        if self.type in b"LKxXg":
            archive.header_bytes += max(self.size, _LEAST_HEADER_BYTES)
            if archive.header_bytes > MAX_HEADER_BYTES:
                raise Refusal(
                    "", f"The long names and PAX headers of a member have more than {MAX_HEADER_BYTES} bytes."
                )
        # An archive of an image has documents and layers, which nothing writes as sparse files.
        if self.type == tarfile.GNUTYPE_SPARSE and not isinstance(archive.fileobj, Stream):
            raise _unknown_sparse(self.name)
        if self.type == tarfile.XGLTYPE:
            # A header for all that follow describes the archive; docker passes over it too.
            archive.fileobj.read(_padded(self.size))
            return read_header(archive)
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]

    def _proc_pax(self, archive: Archive) -> TarHeader:
        data = archive.fileobj.read(_padded(self.size))[: self.size]
        records, pairs = _read_records(data, archive)
        header = read_header(archive)
        header._apply(records, pairs, archive)
        return header

    def _apply(self, records: dict[str, bytes], pairs: Sequence[bytes], archive: Archive) -> None:
        self.records = {**self.records, **records}
        if name := records.get("GNU.sparse.name") or records.get("path"):
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
        if not self.isreg():
            return
        if "size" in records and self.sparse is None:
            # For sizes that the header's eleven octal digits cannot hold (8 GiB); tarfile took the next header's place
            # from those.
            self.size = self.stored = decimal(records["size"], self.name)
            archive.offset = self.offset_data + _padded(self.size)
        if any(key.startswith("GNU.sparse.") for key in records) or pairs:
            self._apply_sparse(records, pairs, archive)

    def _apply_sparse(self, records: dict[str, bytes], pairs: Sequence[bytes], archive: Archive) -> None:
        if not isinstance(archive.fileobj, Stream) or self.sparse is not None:
            raise _unknown_sparse(self.name)
        before = archive.fileobj.tell()
        self.sparse = pax_map(records, pairs, archive.fileobj, self.name)
        self.stored -= archive.fileobj.tell() - before
        size = records.get("GNU.sparse.realsize") or records.get("GNU.sparse.size", b"")
        self.size = decimal(size, self.name)

    def segments(self) -> list[Segment] | None:
        """The map of a sparse file, checked; None for any other file."""
        if self.sparse is None:
            return None
        segments = [segment for segment in self.sparse if segment != (0, 0)]  # unused places of the old format
        check(segments, self.size, self.stored, self.name)
        return segments


def read_header(archive: Archive) -> TarHeader:
    """The next member's header, after those that describe it.

    Raises:
        Refusal: it is damaged, or over a limit; tarfile's HeaderError.
    """
    return TarHeader.fromtarfile(cast("tarfile.TarFile", archive))


def _padded(size: int) -> int:
    return size + -size % BLOCK


def _unknown_sparse(name: str) -> Refusal:
    return Refusal(name, "It is sparse in a way that is not known here.")


def text(raw: bytes) -> str:
    """Bytes of a name as a string."""
    return raw.decode("utf-8", "surrogateescape")


def _read_records(data: bytes, archive: Archive) -> tuple[dict[str, bytes], list[bytes]]:
    """PAX records, ``LENGTH KEY=VALUE\\n``; apart from them the numbers of a sparse map of version 0.0."""
    records: dict[str, bytes] = {}
    pairs = []
    at = 0
    while at < len(data):
        digits = data[at : at + 20].split(b" ", 1)[0]
        length = int(digits) if digits.isdigit() else 0
        raw, equals, value = data[at + len(digits) + 1 : at + length - 1].partition(b"=")
        # The shortest record is "5 a=\n" without a value: digits, blank, one letter, "=" and the line's end.
        if length < len(digits) + 4 or data[at + length - 1 : at + length] != b"\n" or not equals:
            raise Refusal("", "A PAX header is damaged.")
        archive.records += 1
        if (key := text(raw)) in _PAIRS:
            pairs.append(value)
        else:
            records[key] = value
        at += length
    if archive.records > MAX_RECORDS:
        raise Refusal("", f"It has more than {MAX_RECORDS} PAX records.", "Do not use the image: no layer has as many.")
    return records, pairs
