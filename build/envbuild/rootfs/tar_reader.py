"""The members of a tar, read in one pass: ustar, GNU and PAX, names in any bytes.

tarfile knows these formats too, and takes longer for a member than copying its content does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from envbuild.rootfs import sparse
from envbuild.rootfs.members import Kind, Member, Refusal, tidy_name
from envbuild.rootfs.stream import BLOCK, Content, Stream, padding

_BOMB = "Nothing honest has holes of that size; do not use the image."
# Long names and PAX headers of one member are kept in memory; no real ones come near.
MAX_HEADER_BYTES = 4 << 20
# Of a whole layer. A member takes time however small it is, and so does a record: real ones have one to four.
MAX_MEMBERS = 3_000_000
MAX_RECORDS = 4 * MAX_MEMBERS
# Owners are 32 bits (chown(2)).
MAX_OWNER = (1 << 32) - 1
_KINDS = {
    b"0": Kind.FILE,
    b"\0": Kind.FILE,
    b"7": Kind.FILE,  # contiguous, which means nothing today
    b"S": Kind.FILE,  # GNU's old sparse format
    b"1": Kind.HARD_LINK,
    b"2": Kind.SYMLINK,
    b"3": Kind.CHARACTER,
    b"4": Kind.BLOCK,
    b"5": Kind.DIRECTORY,
    b"6": Kind.FIFO,
}
_EMPTY = bytes(BLOCK)
# As docker and GNU tar write them into PAX headers.
_XATTR = "SCHILY.xattr."
# name, mode, uid, gid, size, mtime, checksum, type, link, magic and version; owners' names and devices; prefix.
_FIELDS = struct.Struct("100s8s8s8s12s12s8sc100s8s80s155s")
MAX_TIME = (1 << 32) - 1


@dataclass
class _Extra:
    """What headers before a member say of it; ``size``: how many bytes they have."""

    name: bytes | None = None
    link: bytes | None = None
    records: dict[str, bytes] = field(default_factory=dict)
    pairs: list[bytes] = field(default_factory=list)
    size: int = 0
    count: int = 0


def read_tar(pieces: Iterator[bytes], limit_bytes: int) -> Iterator[tuple[Member, Content | None]]:
    """The members in their order, a file's with its content; all of the stream is read in the end.

    Args:
        limit_bytes: how large the sparse files may be together.

    Raises:
        Refusal: the tar is damaged, or has something that no layer has.
    """
    stream = Stream(pieces)
    extra = _Extra()
    members, records = 0, 0
    while not stream.at_end():
        header = stream.take(BLOCK)
        if header == _EMPTY:
            break
        kind = header[156:157]
        if kind in b"LKxXg":
            _read_extra(extra, kind, header, stream)
            continue
        member, segments, stored = _member(header, extra, stream)
        members, records = members + 1, records + extra.count
        if members > MAX_MEMBERS or records > MAX_RECORDS:
            raise Refusal(
                "",
                f"It has more than {MAX_MEMBERS} members, or more than {MAX_RECORDS} PAX records.",
                "Nothing honest has as many; do not use the image.",
            )
        extra = _Extra()
        if member.kind is not Kind.FILE:
            yield member, None
            continue
        if segments is not None:
            limit_bytes -= member.size
            if limit_bytes < 0:
                raise Refusal(member.name, "With it, the layer's sparse files are larger than the layer may be.", _BOMB)
        parts = stream.pieces(stored) if segments is None else sparse.expanded(segments, member.size, stream)
        yield member, Content(member.size, parts)
        for _ in parts:  # what was not read
            pass
        stream.skip(padding(stored))
    stream.drain()


def number(raw: bytes) -> int:
    """A field of a header: octal digits, or binary where those are too few (GNU)."""
    if raw[0] & 0x80:
        value = int.from_bytes(raw, "big") & ((1 << (8 * len(raw) - 1)) - 1)
        return value if not raw[0] & 0x40 else value - (1 << (8 * len(raw) - 1))
    text = raw.split(b"\0", 1)[0].strip()
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise Refusal("", f"A tar header is damaged: {raw!r} is no number.") from None


def text(raw: bytes) -> str:
    """Bytes of a name as a string."""
    return raw.decode("utf-8", "surrogateescape")


def _checked(header: bytes) -> tuple[bytes, ...]:
    fields = _FIELDS.unpack_from(header)
    stated = number(fields[6])
    rest = header[:148] + header[156:]
    if sum(rest) + 256 != stated and sum(struct.unpack("504b", rest)) + 256 != stated:
        raise Refusal("", "A tar header is damaged: its checksum is wrong.")
    return fields


def _read_extra(extra: _Extra, kind: bytes, header: bytes, stream: Stream) -> None:
    size = number(_checked(header)[4])
    # Each counts for a block at least: empty ones in a row take time too.
    extra.size += max(size, BLOCK)
    if size < 0 or extra.size > MAX_HEADER_BYTES:
        raise Refusal("", f"The long names and PAX headers of a member have more than {MAX_HEADER_BYTES} bytes.")
    data = stream.take(size)
    stream.skip(padding(size))
    if kind == b"L":
        extra.name = data.split(b"\0", 1)[0]
    elif kind == b"K":
        extra.link = data.split(b"\0", 1)[0]
    elif kind != b"g":  # a header for all that follow tells of the archive, and docker passes over it too
        _read_records(extra, data)


def _read_records(extra: _Extra, data: bytes) -> None:
    """PAX records: ``LENGTH KEY=VALUE\\n``."""
    at = 0
    while at < len(data):
        digits = data[at : at + 20].split(b" ", 1)[0]
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = data[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if length < len(digits) + 4 or data[at + length - 1 : at + length] != b"\n" or not equals:
            raise Refusal("", "A PAX header is damaged.")
        extra.count += 1
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            extra.pairs.append(value)
        else:
            extra.records[text(key)] = value
        at += length


def _member(header: bytes, extra: _Extra, stream: Stream) -> tuple[Member, list[sparse.Segment] | None, int]:
    """A member; for a sparse file its map; and the size of what is stored."""
    raw, mode, uid, gid, size, mtime, _, code, link, magic, _, prefix = _checked(header)
    records = extra.records
    raw = raw.split(b"\0", 1)[0]
    if magic[:6] == b"ustar\0" and prefix[0]:
        raw = prefix.split(b"\0", 1)[0] + b"/" + raw
    whole = text(records.get("GNU.sparse.name") or records.get("path") or extra.name or raw)
    name = tidy_name(whole)
    kind = _kind(code, whole, name)
    stored = sparse.decimal(records["size"], name) if "size" in records else number(size)
    if stored < 0:
        raise Refusal(name, "Its size is negative.")
    owner = sparse.decimal(records["uid"], name) if "uid" in records else number(uid)
    group = sparse.decimal(records["gid"], name) if "gid" in records else number(gid)
    if not (0 <= owner <= MAX_OWNER and 0 <= group <= MAX_OWNER):
        raise Refusal(name, f"Its owner {owner} or group {group} is none: they have 32 bits.")
    member = Member(
        name,
        kind,
        number(mode) & 0o7777,
        owner,
        group,
        _time(records.get("mtime"), mtime, name),
        stored if kind is Kind.FILE else 0,
    )
    if records:
        member.xattrs = tuple(sorted(key[len(_XATTR) :] for key in records if key.startswith(_XATTR)))
    if kind is Kind.SYMLINK or kind is Kind.HARD_LINK:
        member.link = text(records.get("linkpath") or extra.link or link.split(b"\0", 1)[0])
        _check_link(member)
    if kind is not Kind.FILE:
        return member, None, 0
    if code == b"S":
        segments, member.size = sparse.old_map(header, stream, number, name)
    elif any(key.startswith("GNU.sparse.") for key in records):
        segments, stored = _pax_sparse(member, extra, stream, stored)
    else:
        return member, None, stored
    sparse.check(segments, member.size, stored, name)
    return member, segments, stored


def _kind(code: bytes, whole: str, name: str) -> Kind:
    kind = _KINDS.get(code)
    if kind is None:
        raise Refusal(name, f"Its type is {code!r}; layers hold files, directories, links, FIFOs and devices.")
    if code in (b"0", b"\0") and whole.endswith("/"):
        kind = Kind.DIRECTORY  # as tars from before 1988 have them
    if not name and kind is not Kind.DIRECTORY:
        raise Refusal(whole or "''", f"A {kind.value} has no name.")
    return kind


def _pax_sparse(member: Member, extra: _Extra, stream: Stream, stored: int) -> tuple[list[sparse.Segment], int]:
    records, name = extra.records, member.name
    if (records.get("GNU.sparse.major"), records.get("GNU.sparse.minor")) == (b"1", b"0"):
        segments, used = sparse.leading_map(stream, name)
        member.size = sparse.decimal(records.get("GNU.sparse.realsize", b""), name)
        return segments, stored - used
    found = sparse.pax_map(records, extra.pairs, name)
    if found is None:
        raise Refusal(name, "It is sparse in a way that is not known.")
    member.size = sparse.decimal(records.get("GNU.sparse.size", b""), name)
    return found, stored


def _check_link(member: Member) -> None:
    if not member.link or "\0" in member.link:
        raise Refusal(member.name, f"The {member.kind.value} leads to an empty name, or to one with a NUL byte.")
    if len(member.link) > 4095:
        raise Refusal(member.name, f"The {member.kind.value} leads to a name of more than 4095 bytes.")


def _time(record: bytes | None, raw: bytes, name: str) -> int:
    if record is None:
        seconds = number(raw)
    else:
        whole = record.split(b".", 1)[0]
        seconds = -1 if whole.startswith(b"-") else sparse.decimal(whole, name)
    return min(max(seconds, 0), MAX_TIME)  # what a squashfs can hold
