"""Sparse files in tars: the maps in PAX headers (GNU's 0.0, 0.1 and 1.0), and the content that they describe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from envbuild.rootfs.members import Refusal
from envbuild.rootfs.stream import BLOCK, Stream

MAX_SEGMENTS = 1 << 18
_ZEROS = memoryview(bytes(1 << 20))
# Offset and length.
Segment = tuple[int, int]


def decimal(text: bytes, name: str) -> int:
    """A number of a map or of a PAX record."""
    # int() alone takes signs, blanks and underscores, and long for very many digits. 64 bits are 20 digits.
    if not text.isdigit() or len(text) > 20:
        raise Refusal(name, f"A number was expected and {text[:40]!r} found.")
    return int(text)


def check(segments: Sequence[Segment], size: int, stored: int, name: str) -> None:
    """Refuse a map whose segments overlap, lie outside of the file, or are not what is stored."""
    if size < 0:
        raise Refusal(name, "The sparse file has a negative size.")
    end = 0
    for offset, length in segments:
        if offset < end or length < 0 or offset + length > size:
            raise Refusal(name, "The map of the sparse file is wrong: its segments overlap or lie outside of it.")
        end = offset + length
    if sum(length for _, length in segments) != stored:
        raise Refusal(name, "The map of the sparse file does not fit to what is stored of it.")


def expanded(segments: Sequence[Segment], size: int, stream: Stream) -> Iterator[memoryview]:
    """The content of a sparse file, its holes as zeros."""
    at = 0
    for offset, length in segments:
        yield from _hole(offset - at)
        yield from stream.pieces(length)
        at = offset + length
    yield from _hole(size - at)


def _hole(length: int) -> Iterator[memoryview]:
    while length > 0:
        part = _ZEROS[:length]
        length -= len(part)
        yield part


def pax_map(records: Mapping[str, bytes], pairs: Sequence[bytes], stream: Stream, name: str) -> list[Segment]:
    """The map of a file that is sparse by its PAX records."""
    # GNU tar manual, "Storing Sparse Files": 0.0 has pairs of records, 0.1 one list, 1.0 lines before the data.
    if (records.get("GNU.sparse.major"), records.get("GNU.sparse.minor")) == (b"1", b"0"):
        return _leading_map(stream, name)
    numbers = pairs
    if "GNU.sparse.map" in records:
        numbers = records["GNU.sparse.map"].split(b",") if records["GNU.sparse.map"] else []
    elif "GNU.sparse.size" not in records:
        raise Refusal(name, "It is sparse in a way that is not known.")
    if len(numbers) % 2 or len(numbers) > 2 * MAX_SEGMENTS:
        raise _too_many(name)
    values = [decimal(word, name) for word in numbers]
    return list(zip(values[::2], values[1::2], strict=True))


def _leading_map(stream: Stream, name: str) -> list[Segment]:
    """The map of version 1.0, which lies before the data."""
    text = b""

    def line() -> int:
        nonlocal text
        while b"\n" not in text:
            text += stream.read(BLOCK)
            # A number has at most 20 digits, so a line is in one block or crosses into the next.
            if len(text) > 2 * BLOCK:
                raise Refusal(name, "The map of the sparse file is wrong: a number does not end.")
        word, _, text = text.partition(b"\n")
        return decimal(word, name)

    count = line()
    if count > MAX_SEGMENTS:
        raise _too_many(name)
    return [(line(), line()) for _ in range(count)]


def _too_many(name: str) -> Refusal:
    return Refusal(name, f"The map of the sparse file is wrong, or has more than {MAX_SEGMENTS} segments.")
