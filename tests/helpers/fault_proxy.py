"""A proxy on loopback before a real server, which spoils the answers that a test names."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from helpers.loopback import serving


@dataclass
class Fault:
    """What happens to requests that match.

    Attributes:
        method: of the requests; any when empty.
        path: a part of their path and query.
        times: how often; then they are let through.
        status: answered in place of the server, with ``headers`` and ``body``.
        cut_after: the connection is closed after so many bytes of the body.
        keep: the body ends after so many bytes, and is said to.
        swap: the body in place of the server's.
        cut_request: the connection is closed after so many bytes of the request's body, without an answer.
        drop_answer: the server does what is asked, and the connection is closed without its answer.
        hold: called before the request goes on to the server.
    """

    method: str = ""
    path: str = ""
    times: int = 10**9
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_after: int | None = None
    keep: int | None = None
    swap: bytes | None = None
    cut_request: int | None = None
    drop_answer: bool = False
    hold: Callable[[], object] = lambda: None
    seen: int = 0


@dataclass
class FaultProxy:
    """Where it is, what it spoils, and what it was asked.

    Attributes:
        translate: makes the headers that the server gets out of those that came.
        own: the body of an answer of its own; None: the server is asked.
        seen: gets each request with its body and the server's status; gives headers to add to the answer.
        translate_back: the same of the headers of its answers.
    """

    address: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    translate: Callable[[dict[str, str]], dict[str, str]] = dict
    own: Callable[[str, str], bytes | None] = lambda method, path: None
    seen: Callable[[str, str, bytes, int], Mapping[str, str]] = lambda method, path, body, status: {}
    translate_back: Callable[[dict[str, str]], dict[str, str]] = dict

    @property
    def host(self) -> str:
        """Its host and port."""
        return self.address.removeprefix("http://")

    def add(self, **changes: object) -> Fault:
        fault = Fault(**changes)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def fault_for(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.method in ("", method) and fault.path in urllib.parse.unquote(path) and fault.seen < fault.times:
                fault.seen += 1
                return fault
        return None

    def count(self, method: str, part: str = "") -> int:
        """How many such requests there were."""
        return sum(made == method and part in path for made, path, _ in self.requests)


@contextlib.contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """A proxy before the server at ``http://HOST:PORT`` while the block runs."""
    proxy = FaultProxy()
    target = urllib.parse.urlsplit(upstream).netloc

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # the client left: so it is with cut connections
                super().handle()

        def do_any(self) -> None:
            proxy.requests.append((self.command, self.path, dict(self.headers)))
            fault = proxy.fault_for(self.command, self.path)
            if fault is not None and fault.cut_request is not None:
                self.rfile.read(fault.cut_request)
                self.hang_up()
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if fault is not None and fault.status:
                self.answer(fault.status, fault.headers, fault.body)
                return
            if fault is not None:
                fault.hold()
            if (answered := proxy.own(self.command, self.path)) is not None:
                self.answer(200, {"Content-Type": "application/vnd.oci.image.index.v1+json"}, answered)
                return
            server = http.client.HTTPConnection(target, timeout=30)
            # Host as it came, so that the server's own addresses lead here.
            server.request(self.command, self.path, body=body, headers=proxy.translate(dict(self.headers)))
            came = server.getresponse()
            content = came.read()
            headers = {name: value for name, value in came.getheaders() if name.lower() != "transfer-encoding"}
            server.close()
            headers |= proxy.seen(self.command, self.path, body, came.status)
            if fault is not None and fault.drop_answer:
                self.hang_up()
                return
            self.spoiled(came.status, proxy.translate_back(headers), content, fault)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_any

        def spoiled(self, status: int, headers: dict[str, str], content: bytes, fault: Fault | None) -> None:
            if fault is None:
                self.answer(status, headers, content)
            elif fault.swap is not None:
                self.answer(status, headers, fault.swap)
            elif fault.keep is not None:
                self.answer(status, headers, content[: fault.keep])
            elif fault.cut_after is not None:
                self.answer(status, headers, content, cut_after=fault.cut_after)
            else:
                self.answer(status, headers, content)

        def answer(self, status: int, headers: Mapping[str, str], body: bytes, cut_after: int | None = None) -> None:
            self.send_response_only(status)
            length = next((value for name, value in headers.items() if name.lower() == "content-length"), "0")
            for name, value in headers.items():
                if name.lower() != "content-length":
                    self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body if cut_after is None else body[:cut_after])
            self.wfile.flush()
            if cut_after is not None:
                self.hang_up()

        def hang_up(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    with serving(Handler) as server:
        proxy.address = f"http://127.0.0.1:{server.server_port}"
        yield proxy
