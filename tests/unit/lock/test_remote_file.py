"""The METADATA of a wheel is read without the rest of it."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.core.errors import NetworkError
from envbuild.core.progress import SilentReporter
from envbuild.lock.components import downloads
from envbuild.lock.components.downloads import wheel_metadata
from envbuild.lock.uv import remote_file
from envbuild.lock.uv.fetch import Answer
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
        file = {"url": "https://host/lib-1-py3-none-any.whl", "hash": downloads.sha256_bytes(content)}
        return wheel_metadata(file, "lib 1", context)

    assert read() == METADATA
    assert sum(sent) <= most
    before = len(sent)
    assert read() == METADATA
    assert len(sent) == before
