"""An HTTP server on loopback for tests, in threads of the test's own process."""

from __future__ import annotations

import contextlib
import http.server
import sys
import threading
from collections.abc import Iterator
from typing import Any


class Server(http.server.ThreadingHTTPServer):
    """Silent when a client leaves in the middle of an answer: a test that reads stderr would read that too."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serving(handler: Any) -> Iterator[Server]:
    """A server with this handler on a free port while the block runs."""
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
