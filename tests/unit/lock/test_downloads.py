"""Files of an index that are not what they should be: each ends in an error with words, never in a fault."""

import base64
import gzip
import http.server
import io
import socketserver
import tarfile
import zipfile
from dataclasses import replace

import pytest
from helpers.locks import lock_context
from helpers.loopback import serving

from envbuild.core.errors import CheckRefusedError, NetworkError
from envbuild.lock.components.downloads import fetch_file, metadata_in
from envbuild.lock.components.sdist_metadata import declaring_files
from envbuild.lock.uv_lock import LockedFile

PKG_INFO, METADATA = "kernels-1.0/PKG-INFO", "kernels-1.0.dist-info/METADATA"


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nbanana\r\n",
        b"banana\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        b"",
    ],
    ids=["short", "short-chunk", "no-chunk", "no-status", "long-header", "empty"],
)
def test_reply_that_is_no_file_is_a_network_error(tmp_path, reply):
    class Answer(socketserver.StreamRequestHandler):
        def handle(self):
            while self.rfile.readline().strip():
                pass
            self.wfile.write(reply)

    with serving(Answer) as server:
        url = f"http://127.0.0.1:{server.server_port}/kernels-1.0.tar.gz"
        with pytest.raises(NetworkError, match="cannot download the sdist of kernels"):
            fetch_file(LockedFile(url=url), "the sdist of kernels", lock_context(tmp_path))


@pytest.mark.parametrize("address", ["http://127.0.0.1:x/kernels.tar.gz", "http://127.0.0.1:1/a b.tar.gz"])
def test_address_that_is_none_is_a_network_error(tmp_path, address):
    with pytest.raises(NetworkError, match="cannot download the sdist of kernels"):
        fetch_file(LockedFile(url=address), "the sdist of kernels", lock_context(tmp_path))


def zipped(name: str, **header: int) -> bytes:
    """A zip whose only member has a damaged stream, or these fields in both of its headers."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, "Metadata-Version: 2.1\n" * 20)
    content = bytearray(stream.getvalue())
    # APPNOTE.TXT 4.3.7 and 4.3.12: flags and method of the local header, then of the central directory's.
    central = content.index(b"PK\1\2")
    for field, value in header.items():
        for place in {"flags": (6, central + 8), "method": (8, central + 10)}[field]:
            content[place : place + 2] = value.to_bytes(2, "little")
    if not header:
        start = 30 + len(name)
        content[start : start + 4] = b"\xff" * 4
    return bytes(content)


@pytest.mark.parametrize("header", [{}, {"flags": 1}, {"method": 77}], ids=["damaged", "encrypted", "unknown-method"])
def test_zip_that_cannot_be_read_is_refused(header):
    with pytest.raises(CheckRefusedError):
        declaring_files("kernels", zipped(PKG_INFO, **header))
    with pytest.raises(CheckRefusedError, match="the wheel of kernels cannot be read"):
        metadata_in(io.BytesIO(zipped(METADATA, **header)), "kernels")


def test_tar_that_is_damaged_in_its_middle_is_refused():
    """tarfile takes a damaged header for the end, so that a later egg-info would be missed without a word."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name in (PKG_INFO, "kernels-1.0/kernels.egg-info/requires.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = 6
            tar.addfile(entry, io.BytesIO(b"torch\n"))
    # Stored, not compressed: the damage is in a header of the tar, and gzip's checksum alone tells.
    content = bytearray(gzip.compress(plain.getvalue(), 0))
    assert set(declaring_files("kernels", bytes(content))) == {"PKG-INFO", "requires.txt", "egg-info"}
    content[content.index(b"kernels-1.0/kernels.egg-info")] ^= 0xFF
    with pytest.raises(CheckRefusedError, match="kernels"):
        declaring_files("kernels", bytes(content))


def test_file_of_an_index_of_the_site_is_asked_for_with_its_password(tmp_path, monkeypatch):
    asked = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"file")

        def log_message(self, *_):
            pass

    monkeypatch.setenv("UV_INDEX_SITE_USERNAME", "u")
    monkeypatch.setenv("UV_INDEX_SITE_PASSWORD", "p")
    with serving(Answer) as server:
        context = lock_context(tmp_path)
        host = f"http://127.0.0.1:{server.server_port}"
        context = replace(context, site=context.site.model_copy(update={"indexes": {"site": f"{host}/simple"}}))
        assert fetch_file(LockedFile(url=f"{host}/kernels-1.0.tar.gz"), "it", context)[0] == b"file"
    assert asked == ["Basic " + base64.b64encode(b"u:p").decode()]
