"""An OCI layout as a registry on loopback, for tools that take images from registries alone. Read only."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPOSITORY = "envbuild/image"
TAG = "latest"
_MANIFEST = re.compile(rf"/v2/{REPOSITORY}/manifests/({TAG}|sha256:[0-9a-f]{{64}})")
_BLOB = re.compile(rf"/v2/{REPOSITORY}/blobs/(sha256:[0-9a-f]{{64}})")


@contextlib.contextmanager
def served(layout: Path, image_digest: str) -> Iterator[str]:
    """``127.0.0.1:PORT`` of a registry that has the image as :data:`REPOSITORY` with tag :data:`TAG`, for a while."""

    class Handler(_Handler):
        blobs = layout / "blobs/sha256"
        digest = image_digest

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="registry", daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD of the distribution spec."""

    blobs: Path
    digest: str
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the class above
        """Say nothing: what was fetched is in the log of who fetched it."""

    def _answer(self, *, with_body: bool) -> None:
        if self.path == "/v2/":
            self._send("application/json", 2, "")
            if with_body:
                self.wfile.write(b"{}")
            return
        kind, digest = self._asked()
        file = self.blobs / digest.removeprefix("sha256:")
        if not digest or not file.is_file():
            self.send_error(404)
            return
        self._send(kind, file.stat().st_size, digest)
        if with_body:
            with file.open("rb") as stream:
                shutil.copyfileobj(stream, self.wfile, 1 << 20)

    def _asked(self) -> tuple[str, str]:
        """The media type and the digest of what is asked for; empty where that is nothing."""
        if found := _BLOB.fullmatch(self.path):
            return "application/octet-stream", found[1]
        if found := _MANIFEST.fullmatch(self.path):
            digest = self.digest if found[1] == TAG else found[1]
            file = self.blobs / digest.removeprefix("sha256:")
            return (json.loads(file.read_bytes())["mediaType"], digest) if file.is_file() else ("", "")
        return "", ""

    def _send(self, kind: str, size: int, digest: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        if digest:
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
