"""Messages between the nodes of a run: JSON objects over TCP, one a line, each with a proof of who sent it.

Before anything else both ends prove that they have the run's token, without sending it (HMAC-SHA256, RFC 2104, over
both ends' nonces)::

    agent  {"hello": 1, "node": R, "nonce": A}
    head   {"nonce": B, "proof": HMAC(token, "head" A B R)}
    agent  {"proof": HMAC(token, "agent" A B R)}

After that each line is the HMAC of its direction, its number and its text, then the text: a line that somebody else
sends, repeats or removes ends the connection.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Message = dict[str, Any]
Role = Literal["head", "agent"]

VERSION = 1
NONCE_BYTES = 32
# The longest message is the report of a case's gradients: some 100 bytes a tensor.
MOST_LINE_BYTES = 64 * 2**20
# Of a peer that has proven nothing yet.
MOST_GREETING_BYTES = 1024
# What waits for a peer that does not read: more means that it hangs.
MOST_WAITING_BYTES = 4 * MOST_LINE_BYTES
_CHUNK_BYTES = 2**18


class WireError(Exception):
    """A peer that cannot prove the token, or sends what is no message."""


class TokenError(Exception):
    """The token file cannot be used."""


def read_token(path: Path) -> bytes:
    """Return the token of a run, from a file that its owner alone can read.

    Raises TokenError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            token = file.read(4096).strip()
    except OSError as error:
        raise TokenError(f"--token-file {path} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise TokenError(f"--token-file {path} is not a file")
    if status.st_mode & 0o077:
        raise TokenError(
            f"--token-file {path} can be read or written by other accounts (mode {stat.S_IMODE(status.st_mode):o}), "
            "and who has it can take part in the run: write a new one with mode 600"
        )
    if len(token) < NONCE_BYTES:
        raise TokenError(f"--token-file {path} has {len(token)} bytes, and a token has at least {NONCE_BYTES}")
    return token


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """What both ends of a connection know before it counts: the agent's node, and both nonces."""

    node: int
    agent_nonce: str
    head_nonce: str

    def proof(self, token: bytes, role: Role) -> str:
        """Return what proves that an end has the token."""
        return _mac(token, f"{role} {self.agent_nonce} {self.head_nonce} {self.node}".encode())

    def proves(self, proof: object, token: bytes, role: Role) -> bool:
        """Return whether an end has proven it."""
        return isinstance(proof, str) and hmac.compare_digest(proof.encode(), self.proof(token, role).encode())

    def session_key(self, token: bytes) -> bytes:
        """Return the key of the lines that follow."""
        return bytes.fromhex(_mac(token, f"session {self.agent_nonce} {self.head_nonce} {self.node}".encode()))


def nonce() -> str:
    """Return a number that is used once."""
    return secrets.token_hex(NONCE_BYTES)


class Wire:
    """One end of a connection; its socket does not block.

    Until `authenticate` lines are bare, and short; `waiting` tells whether something is still to be sent.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # Small messages that somebody waits for.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._put_back: list[Message] = []
        self._received = bytearray()
        # How much of it has no end of a line.
        self._searched = 0
        self._unsent = bytearray()
        self._key: bytes | None = None
        self._sends_as: Role = "head"
        self._sent_lines = 0
        self._read_lines = 0

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """The address of this end."""
        address: str = self._socket.getsockname()[0]
        return address

    @property
    def waiting(self) -> bool:
        """True while something waits until the peer reads."""
        return bool(self._unsent)

    def authenticate(self, key: bytes, role: Role) -> None:
        """From here on lines have proofs; `role` is this end's."""
        self._key, self._sends_as = key, role

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as the peer takes now; `flush` sends the rest. Raises WireError."""
        text = json.dumps(message, allow_nan=False).encode()
        if self._key is not None:
            text = self._line_proof(self._sends_as, self._sent_lines, text) + b" " + text
            self._sent_lines += 1
        self._unsent += text + b"\n"
        self.flush()
        if len(self._unsent) > MOST_WAITING_BYTES:
            raise WireError("it reads nothing any more")

    def flush(self) -> None:
        """Send what waits. Raises WireError when the peer is gone."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[:_CHUNK_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            raise WireError(f"the connection broke: {error.strerror or error}") from error

    def receive(self) -> list[Message]:
        """Return the messages that have arrived. Raises WireError when the peer is gone, or sends something else."""
        messages, self._put_back = self._put_back, []
        ended = False
        try:
            chunk = self._socket.recv(_CHUNK_BYTES)
            ended = not chunk
        except BlockingIOError:
            chunk = b""
        except OSError as error:
            raise WireError(f"the connection broke: {error.strerror or error}") from error
        self._received += chunk
        most = MOST_GREETING_BYTES if self._key is None else MOST_LINE_BYTES
        while (end := self._received.find(b"\n", self._searched)) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            self._searched = 0
            messages.append(self._message(line))
            if self._key is None:
                # The next line may have a proof, and its key is not known before this one is read.
                break
        else:
            self._searched = len(self._received)
        if len(self._received) > most:
            raise WireError(f"it sent a line of more than {most} bytes")
        if ended and not messages:
            raise WireError("the connection was closed")
        return messages

    def put_back(self, messages: list[Message]) -> None:
        """Have `receive` return these messages once more, before others."""
        self._put_back = messages

    def close(self) -> None:
        """Close this end."""
        with suppress(OSError):
            self._socket.close()

    def _message(self, line: bytes) -> Message:
        if self._key is not None:
            proof, _, line = line.partition(b" ")
            sender: Role = "agent" if self._sends_as == "head" else "head"
            if not hmac.compare_digest(proof, self._line_proof(sender, self._read_lines, line)):
                raise WireError("it sent a line without a proof")
            self._read_lines += 1
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WireError("it sent what is not JSON") from error
        if not isinstance(message, dict):
            raise WireError("it sent what is not an object of JSON")
        return message

    def _line_proof(self, sender: Role, number: int, text: bytes) -> bytes:
        return _mac(self._key or b"", f"{sender} {number} ".encode() + text).encode()


def _mac(key: bytes, content: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest()
