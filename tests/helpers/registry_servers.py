"""A registry on loopback that answers as a test says."""

from __future__ import annotations

import contextlib
import http.server
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from helpers.loopback import serving

# Status, headers, and the body: in pieces, it has no stated length.
Reply = tuple[int, dict[str, str], bytes | Iterable[bytes]]


@dataclass
class Server:
    """A server that gives the set answer; with a pause, byte by byte."""

    port: int = 0
    cut_once: int = 0
    pause: float = 0.0
    answer: Callable[[str, str, dict[str, str], bytes], Reply] = lambda *_: (404, {}, b"")
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextlib.contextmanager
def answering() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = (self.command, self.path, dict(self.headers), body)
            state.requests.append(request)
            status, headers, content = state.answer(*request)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if isinstance(content, bytes):
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            cut, state.cut_once = state.cut_once, 0
            pieces = content
            if isinstance(content, bytes):
                content = content[:cut] if cut else content
                pieces = [bytes([byte]) for byte in content] if state.pause else [content]
            with contextlib.suppress(OSError):  # the client left
                for piece in pieces:
                    self.wfile.write(piece)
                    time.sleep(state.pause)
            self.close_connection = bool(cut) or pieces is content

        do_GET = do_PUT = do_POST = do_PATCH = do_HEAD = do_any

    with serving(Handler) as server:
        state.port = server.server_port
        yield state
