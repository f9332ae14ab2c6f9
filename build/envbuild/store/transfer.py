"""Answers of a registry: who gave them, and their bodies, which a peer that trickles must not hold for ever."""

from __future__ import annotations

import contextlib
import errno
import io
import threading
import time
import urllib.parse
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

CHUNK_BYTES = 1 << 20
# The least that must come, as curl's --speed-limit and --speed-time: a peer that trickles would hold a build for ever.
LEAST_BYTES_A_SECOND, SLOW_SECONDS = 1024, 30.0
# Manifests, lists of tags, errors: what is longer is none.
MOST_ANSWER_BYTES = 64 << 20
# For one of them; and of a file, which goes on where it ended, at least so much on the whole.
ANSWER_SECONDS = 300.0
LEAST_OF_A_FILE = 256 << 10


def receive(response: BaseHTTPResponse, out: IO[bytes], size_bytes: int, seconds: float) -> None:
    """Write a body to a file, up to one chunk more than ``size_bytes``.

    Raises:
        ProtocolError: it comes too slowly, or not whole within ``seconds``.
    """
    from urllib3.exceptions import HTTPError, ProtocolError

    count, over, slow = 0, threading.Event(), threading.Event()
    deadline = time.monotonic() + seconds

    # The read timeout of a socket starts again with each byte. shutdown() ends a read that another thread waits in.
    def watch() -> None:
        seen = 0
        while not over.wait(pause := max(0.0, min(SLOW_SECONDS, deadline - time.monotonic()))):
            late = time.monotonic() >= deadline
            if late or count - seen < LEAST_BYTES_A_SECOND * pause:
                slow.set()
                with contextlib.suppress(ValueError, RuntimeError, OSError):
                    response.shutdown()
                return
            seen = count

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        # read1 returns what has come, so the count grows also where a whole chunk takes long.
        while chunk := response.read1(CHUNK_BYTES):
            out.write(chunk)
            count += len(chunk)
            if out.tell() > size_bytes:
                return
    except (HTTPError, OSError) as error:
        if not slow.is_set() or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
            raise
    finally:
        over.set()
        watcher.join()
    if slow.is_set():
        if time.monotonic() >= deadline:
            raise ProtocolError(f"{count} bytes in {seconds:.0f} s, and not whole")
        raise ProtocolError(f"less than {LEAST_BYTES_A_SECOND} bytes a second for {SLOW_SECONDS:.0f} s")


def longest_seconds(size_bytes: int) -> float:
    """How long so many bytes may take, all tries together."""
    return ANSWER_SECONDS + size_bytes / LEAST_OF_A_FILE


def is_progress(count: int) -> bool:
    """Whether so many bytes are no trickle: what came before the connection was cut need not come again."""
    return count >= LEAST_BYTES_A_SECOND * SLOW_SECONDS


def whole_body(response: BaseHTTPResponse) -> bytes:
    """The whole body of an answer that is no file."""
    body = io.BytesIO()
    receive(response, body, MOST_ANSWER_BYTES, ANSWER_SECONDS)
    return body.getvalue()


def redirected_to(response: BaseHTTPResponse, url: str) -> str:
    """The host that answered, where that is another one than was asked."""
    host = urllib.parse.urlsplit(url).netloc
    for step in response.retries.history if response.retries else ():
        url = urllib.parse.urljoin(url, step.redirect_location or "")
    answered = urllib.parse.urlsplit(url).netloc
    return "" if answered == host else answered
