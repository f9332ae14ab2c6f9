"""The METADATA of a wheel is read without the rest of it."""

from __future__ import annotations

import http.server
import io
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.loopback import serving

from envbuild.catalog.site import load_site
from envbuild.core.errors import NetworkError
from envbuild.core.progress import SilentReporter
from envbuild.lock.components import downloads
from envbuild.lock.components.downloads import wheel_metadata
from envbuild.lock.uv import remote_file
from envbuild.lock.uv.fetch import Answer, FetchLimits
from envbuild.lock.uv_lock import LockedFile
from envbuild.store.local import LocalStore

METADATA = b"Metadata-Version: 2.1\nName: lib\n"


def wheel(first: str) -> bytes:
    buffer = io.BytesIO()
    names = ["lib-1.dist-info/METADATA", "lib/data"]
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names if first == "metadata" else names[::-1]:
            archive.writestr(name, METADATA if "METADATA" in name else os.urandom(1 << 20))
    return buffer.getvalue()


@pytest.mark.parametrize("first", ["metadata", "data"])
@pytest.mark.parametrize(("serves", "most"), [("metadata", 100), ("ranges", 1 << 18), ("wheels", 3 << 20)])
def test_metadata_is_read_without_the_wheel_where_the_server_lets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, serves: str, most: int
) -> None:
    content = wheel(first)
    sent: list[int] = []

    def fetch(url: str, *_: Any, byte_range: str = "", **__: Any) -> Answer:
        body, stated = content, ""
        if url.endswith(".metadata"):
            if serves != "metadata":
                raise NetworkError("403")
            body = METADATA
        elif serves == "ranges":
            begin, _, end = byte_range.partition("-")
            start, stop = (int(begin), int(end) + 1) if begin else (len(content) - int(end), len(content))
            body, stated = content[start:stop], f"bytes {start}-{stop - 1}/{len(content)}"
        sent.append(len(body))
        return Answer(url=url, content_type="", body=body, content_range=stated)

    for module in (downloads, remote_file):
        monkeypatch.setattr(module, "fetch", fetch)
    context: Any = SimpleNamespace(store=LocalStore(tmp_path, SilentReporter()), site=None)

    def read() -> bytes:
        file = LockedFile(url="https://host/lib-1-py3-none-any.whl", hash=downloads.sha256_bytes(content))
        return wheel_metadata(file, "lib 1", context)

    assert read() == METADATA
    assert sum(sent) <= most
    before = len(sent)
    assert read() == METADATA
    assert len(sent) == before


def test_a_server_answers_a_range_with_206(monkeypatch: pytest.MonkeyPatch) -> None:
    """By HTTP, where a part of a page is no answer, and a part of a file is the one that was asked for."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    content = os.urandom(1 << 18)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, stop = (int(begin), int(end) + 1) if begin else (len(content) - int(end), len(content))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            self.wfile.write(content[start:stop])

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}/lib.whl"
        remote = remote_file.open_remote(
            url, "lib", load_site({}), FetchLimits(most_bytes=1 << 20, seconds=10, idle_seconds=10)
        )
        assert isinstance(remote, remote_file.RemoteFile)
        remote.seek(5)
        assert remote.read(10) == content[5:15]
