"""A file on an index of which only the parts that are read are fetched."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from envbuild.catalog.site import Site
from envbuild.lock.uv.fetch import Answer, FetchLimits, fetch

_BLOCK = 1 << 16
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


def open_remote(url: str, title: str, site: Site, limits: FetchLimits) -> RemoteFile | bytes:
    """The file at ``url``; its whole content where the server takes no range requests (RFC 9110, section 14).

    Raises:
        NetworkError: it cannot be had within the limits.
    """

    def part(byte_range: str) -> Answer:
        return fetch(url, title, site, limits, byte_range=byte_range)

    end = part(f"-{_BLOCK}")
    match = _CONTENT_RANGE.fullmatch(end.content_range)
    return RemoteFile(int(match[1]), int(match[2]), end.body, part) if match is not None else end.body


class RemoteFile(io.RawIOBase):
    """A seekable file of ``size`` bytes, of which those from ``start`` on are held."""

    def __init__(self, start: int, size: int, held: bytes, part: Callable[[str], Answer]) -> None:
        self._start, self._size, self._held, self._part, self._position = start, size, held, part, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        first = self._position
        end = min(first + len(buffer), self._size)
        if first >= end:
            return 0
        if first < self._start or end > self._start + len(self._held):
            last = min(max(end, first + _BLOCK), self._size) - 1
            answer = self._part(f"{first}-{last}")
            # A server that takes a range now and then answers with the whole.
            self._start, self._held = (first if answer.content_range else 0), answer.body
        content = self._held[first - self._start : end - self._start]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)
