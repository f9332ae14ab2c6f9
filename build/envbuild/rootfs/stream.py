"""A stream of bytes that comes in pieces, read in the portions that a tar is made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from envbuild.rootfs.members import Refusal

BLOCK = 512


class Stream:
    """Pieces put together. Asking for more than there is refuses the layer."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = b""
        self._at = 0
        self._before = 0

    def tell(self) -> int:
        """How many bytes were read."""
        return self._before + self._at

    def at_end(self) -> bool:
        """Whether nothing is left."""
        # A loop: pieces may be empty.
        while self._at >= len(self._piece):
            piece = next(self._pieces, None)
            if piece is None:
                return True
            self._before += len(self._piece)
            self._piece, self._at = piece, 0
        return False

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        end = self._at + count
        if end <= len(self._piece):
            portion = self._piece[self._at : end]
            self._at = end
            return portion
        return b"".join(self.pieces(count))

    def pieces(self, count: int) -> Iterator[memoryview]:
        """The next ``count`` bytes, in whatever pieces they come."""
        while count:
            if self.at_end():
                raise Refusal("", "The tar ends in the middle of a member.")
            portion = memoryview(self._piece)[self._at : self._at + count]
            self._at += len(portion)
            count -= len(portion)
            yield portion

    def skip_to(self, position: int) -> None:
        """Pass over everything before a position."""
        for _ in self.pieces(position - self.tell()):
            pass

    def drain(self) -> None:
        """Pass over all that is left."""
        while not self.at_end():
            self._at = len(self._piece)


class Content:
    """The content of a file, to be read once and before the next member is asked for."""

    def __init__(self, size: int, parts: Iterator[memoryview]) -> None:
        self.size = size
        self._parts = parts

    def pieces(self) -> Iterator[memoryview]:
        """All of it (or what is left), in whatever pieces it comes."""
        return self._parts

    def guarded(self, guard: AbstractContextManager[None]) -> Content:
        """The same, read within ``guard``, which makes errors of the reader's refusals."""
        # The caller reads it while the generator that yielded it is suspended: a with statement in there would catch
        # nothing.
        return Content(self.size, _within(guard, self._parts))

    def read(self) -> bytes:
        """All of it at once: for small files."""
        return b"".join(self._parts)


def _within(guard: AbstractContextManager[None], parts: Iterator[memoryview]) -> Iterator[memoryview]:
    with guard:
        yield from parts
