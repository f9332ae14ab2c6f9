"""Sparse files in tars: the maps of GNU's formats (old, and 0.0, 0.1 and 1.0 in PAX headers), and their content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from envbuild.rootfs.members import Refusal
from envbuild.rootfs.stream import BLOCK, Stream

MAX_SEGMENTS = 1 << 18
_ZEROS = memoryview(bytes(1 << 20))
Segment = tuple[int, int]


def decimal(text: bytes, name: str) -> int:
    """A number of a map or of a PAX record."""
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


def old_map(header: bytes, stream: Stream, number: Callable[[bytes], int], name: str) -> tuple[list[Segment], int]:
    """Map and size of a member of type S: four segments in its header, more in blocks behind it."""
    segments, more = _entries(header, 386, 4, number), header[482]
    while more:
        block = stream.take(BLOCK)
        segments += _entries(block, 0, 21, number)
        more = block[504]
        if len(segments) > MAX_SEGMENTS:
            raise _too_many(name)
    return segments, number(header[483:495])


def _entries(block: bytes, start: int, count: int, number: Callable[[bytes], int]) -> list[Segment]:
    found = []
    for place in range(start, start + 24 * count, 24):
        if not block[place]:
            break
        found.append((number(block[place : place + 12]), number(block[place + 12 : place + 24])))
    return found


def pax_map(records: dict[str, bytes], pairs: list[bytes], name: str) -> list[Segment] | None:
    """The map in PAX records of versions 0.0 (``pairs``) and 0.1; None when there is none."""
    numbers = pairs
    if "GNU.sparse.map" in records:
        numbers = records["GNU.sparse.map"].split(b",") if records["GNU.sparse.map"] else []
    elif "GNU.sparse.size" not in records:
        return None
    if len(numbers) % 2 or len(numbers) > 2 * MAX_SEGMENTS:
        raise _too_many(name)
    values = [decimal(word, name) for word in numbers]
    return list(zip(values[::2], values[1::2], strict=True))


def leading_map(stream: Stream, name: str) -> tuple[list[Segment], int]:
    """The map of version 1.0, which lies before the data; and how many bytes it takes."""
    text, used = b"", 0

    def line() -> int:
        nonlocal text, used
        while b"\n" not in text:
            text += stream.take(BLOCK)
            used += BLOCK
            if len(text) > 2 * BLOCK:
                raise Refusal(name, "The map of the sparse file is wrong: a number does not end.")
        word, _, text = text.partition(b"\n")
        return decimal(word, name)

    count = line()
    if count > MAX_SEGMENTS:
        raise _too_many(name)
    return [(line(), line()) for _ in range(count)], used


def _too_many(name: str) -> Refusal:
    return Refusal(name, f"The map of the sparse file is wrong, or has more than {MAX_SEGMENTS} segments.")
