"""JSON objects over a Unix socket, one a line, with open descriptors.

Both ends are processes of one run: the runner and the fork server, the runner and a rank.
"""

import json
import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

_CHUNK_BYTES = 65536
# recv_fds drops descriptors beyond this number. One comes with each message, and few messages come at once.
_MOST_DESCRIPTORS = 16

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    """A task for a rank. Its ranks meet at `host` and `port`; the one that `listens` gets the socket's descriptor.

    `part` counts those of the case from 0; `sizes` are those of a bandwidth sweep; `log` is where its output goes.
    """

    task: Literal["case", "bandwidth"]
    case: str
    repeat: int
    part: int
    rank: int
    world_size: int
    host: str
    port: int
    device_index: int
    listens: bool
    out: str
    log: str
    sizes: tuple[int, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a rank answers when a task is done: what its function returned, and files by library and by module.

    Of modules, those that were imported since the last case.
    """

    answer: object
    libraries: Mapping[str, tuple[str, ...]]
    imported: Mapping[str, str]


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pending = b""
        self._messages: deque[Message] = deque()
        self._descriptors: deque[int] = deque()
        self._ended = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> bool:
        """Send a message; False when the other end is gone."""
        content = (json.dumps(message) + "\n").encode()
        with suppress(BrokenPipeError, ConnectionResetError):
            # sendmsg may send a part; the descriptors go with its first byte (unix(7)), the rest follows without.
            sent = socket.send_fds(self._socket, [content], list(descriptors)) if descriptors else 0
            self._socket.sendall(content[sent:])
            return True
        return False

    def receive(self) -> Message | None:
        """Wait for a message and return it; None when the other end is gone."""
        while not self._messages and not self._ended:
            self._read()
        return self._messages.popleft() if self._messages else None

    def receive_all(self) -> tuple[list[Message], bool]:
        """Read what has arrived; return the messages, and whether the other end is gone."""
        if not self._ended:
            self._read()
        messages = list(self._messages)
        self._messages.clear()
        return messages, self._ended

    def descriptor(self) -> int:
        """Return the first descriptor that came and was not taken yet."""
        return self._descriptors.popleft()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self) -> None:
        try:
            chunk, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK_BYTES, _MOST_DESCRIPTORS)
        # An end that closes with messages unread resets the connection instead of ending it.
        except ConnectionResetError:
            chunk, descriptors = b"", []
        self._descriptors.extend(descriptors)
        if not chunk:
            self._ended = True
            return
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        self._messages.extend(json.loads(line) for line in lines)
