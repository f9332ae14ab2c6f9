"""Reads what a daemon says while it builds: JSON lines, and in them BuildKit's own messages.

BuildKit's messages (``moby.buildkit.trace``) are protocol buffers: ``StatusResponse`` of its ``control.proto``. Only
a few fields of them are of use here, so the wire format (https://protobuf.dev/programming-guides/encoding/) is read
directly: the library with its generated classes would be larger than this builder.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TRACE = "moby.buildkit.trace"
IMAGE_ID = "moby.image.id"
# Fields of StatusResponse, Vertex and VertexLog.
_VERTEXES, _LOGS = 1, 3
_DIGEST, _NAME, _CACHED, _COMPLETED, _ERROR = 1, 3, 4, 6, 7
_LOG_VERTEX, _LOG_TEXT = 1, 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass
class Step:
    """A step of a build, as far as it is known."""

    name: str = ""
    cached: bool = False
    done: bool = False
    error: str = ""
    lines: list[str] = field(default_factory=list)
    _rest: str = ""

    def add(self, text: str) -> list[str]:
        """Take in output; the lines that it ended."""
        *ended, self._rest = (self._rest + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self.lines += ended
        return ended

    def output(self) -> str:
        """All that it printed."""
        return "\n".join([*self.lines, *([self._rest] if self._rest else [])])


class Steps:
    """The steps of a build by their digests, from what the daemon streams."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}
        self.image_id = ""
        self.error = ""

    def take(self, message: Mapping[str, Any]) -> Iterator[str]:
        """Take in a message of the stream; the lines that it is worth to people."""
        if "error" in message:
            detail = message.get("errorDetail") or {}
            self.error = str(detail.get("message") or message["error"]).strip()
            return
        aux = message.get("aux")
        if message.get("id") == TRACE and isinstance(aux, str):
            yield from self._trace(aux)
        elif isinstance(aux, Mapping) and aux.get("ID"):
            self.image_id = str(aux["ID"])
        elif isinstance(text := message.get("stream"), str):
            # Builders without BuildKit's messages (podman) print as they go.
            yield from self._step("").add(text)

    def failed(self) -> Step | None:
        """The step that failed: the one with an error of its own, else, where steps are not known, all output."""
        for step in self._steps.values():
            if step.error and "context canceled" not in step.error:
                return step
        return self._steps.get("")

    def all(self) -> tuple[Step, ...]:
        """The steps, in the order in which they came up."""
        return tuple(self._steps.values())

    def _step(self, digest: str) -> Step:
        return self._steps.setdefault(digest, Step())

    def _trace(self, aux: str) -> Iterator[str]:
        try:
            message = base64.b64decode(aux)
            for number, value in fields(message):
                if number == _VERTEXES and isinstance(value, bytes):
                    yield from self._vertex(dict(fields(value)))
                elif number == _LOGS and isinstance(value, bytes):
                    found = dict(fields(value))
                    yield from self._step(_text(found.get(_LOG_VERTEX))).add(_text(found.get(_LOG_TEXT)))
        except (binascii.Error, ValueError):
            return  # told for people's sake alone; how the build ended is said elsewhere

    def _vertex(self, found: Mapping[int, int | bytes]) -> Iterator[str]:
        step = self._step(_text(found.get(_DIGEST)))
        if not step.name:
            step.name = _text(found.get(_NAME))
            yield step.name
        step.error = step.error or _text(found.get(_ERROR))
        if found.get(_CACHED) and not step.cached:
            step.cached = True
            yield f"{step.name}: from the cache"
        step.done = step.done or _COMPLETED in found


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffer: number, and an integer or bytes. Of repeated ones each comes by itself.

    Raises:
        ValueError: it is none, or cut off.
    """
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == _BYTES:
            size, place = _varint(message, place)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if place + size > len(message):
            raise ValueError("cut off")
        yield number, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message) and shift < 64:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, place
        shift += 7
    raise ValueError("cut off")


def _text(value: int | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""
