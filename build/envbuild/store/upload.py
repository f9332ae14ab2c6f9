"""Sends blobs to a registry: in chunks, going on where a connection was cut; or mounts them from another repository.

OCI distribution-spec 1.1, "Pushing a blob in chunks" and "Mounting a blob from another repository".
"""

from __future__ import annotations

import io
import re
import tempfile
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from envbuild.core.digests import sha256_bytes
from envbuild.core.files import machine_errors
from envbuild.store.registry import Registry
from envbuild.store.registry_errors import TRANSIENT
from envbuild.store.transfer import redirected_to, whole_body

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse
    from urllib3.util import Retry

# What a cut connection costs at most. Proxies before registries often refuse bodies of more than 100 MB.
CHUNK_BYTES = 64 << 20
# How often one upload is begun anew, and how often its bytes are sent: a registry that loses each would have them for
# ever.
MOST_OPENED, MOST_TIMES = 20, 10
UPLOADS = "blobs/uploads/"
# How registries answer that take a blob only whole ("POST then PUT").
NO_CHUNKS = frozenset({400, 405, 411, 415, 501})
# The upload is not known any more, or is at another byte than we think: its state says where.
_LOST, _ELSEWHERE = 404, 416
_RANGE = re.compile(r"(?:bytes=)?0-(\d+)")


class FilePart(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, length: int, count: Callable[[int], None]) -> None:
        self._file, self._start, self._length, self._at, self._count = file, start, length, 0, count

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    # urllib3 goes back to the start of a body before it sends it again (util/request.py, rewind_body).
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("only from the start")
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = self._length - self._at
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        self._count(len(data))
        return data


def has_blob(registry: Registry, digest: str, size_bytes: int) -> bool:
    """Whether the repository has a blob."""
    answer = registry.ask("HEAD", f"blobs/{digest}", accept=(200, 404))
    # The size should be stated, and need not be (distribution-spec 1.1, "Checking if content exists in the registry").
    return answer.status == 200 and answer.headers.get("Content-Length", str(size_bytes)) == str(size_bytes)


def mount_blob(registry: Registry, digest: str, repository: str) -> bool:
    """Take a blob over from another repository of the registry; False where it cannot be had from there."""
    query = urllib.parse.urlencode({"mount": digest, "from": repository})
    # 202: it was not mounted, and the registry opened an upload, which it forgets by itself. 403 and 404: this account
    # may not read there.
    answer = registry.ask(
        "POST", f"{UPLOADS}?{query}", accept=(201, 202, 401, 403, 404), headers={"Content-Length": "0"}
    )
    return answer.status == 201


def upload_blob(registry: Registry, file: Path, digest: str, size_bytes: int) -> int:
    """Send a file as a blob; returns the bytes that were sent, those that were sent twice included.

    Raises:
        NetworkError: the registry cannot be reached, or refuses.
    """
    with registry.errors("PUT", UPLOADS), machine_errors(file, "read"), file.open("rb") as content:
        upload = _Upload(registry, content, digest, size_bytes)
        # A blob of one chunk needs no PATCH: two requests instead of three.
        if size_bytes <= CHUNK_BYTES or not upload.in_chunks():
            upload.whole()
        return upload.sent


def upload_bytes(registry: Registry, content: bytes) -> str:
    """Send a small blob, unless it is there; returns its digest."""
    digest = sha256_bytes(content)
    if not has_blob(registry, digest, len(content)):
        with tempfile.TemporaryDirectory(prefix="envbuild-") as folder:
            file = Path(folder) / "blob"
            with machine_errors(file):
                file.write_bytes(content)
            upload_blob(registry, file, digest, len(content))
    return digest


@dataclass
class _Upload:
    registry: Registry
    content: IO[bytes]
    digest: str
    size_bytes: int
    sent: int = 0
    place: str = ""
    offset: int = 0
    furthest: int = 0
    opened: int = 0
    tries: Retry = field(init=False)

    def __post_init__(self) -> None:
        self.tries = self.registry.retries

    def in_chunks(self) -> bool:
        """Send it in chunks; False where the registry takes none."""
        self.open()
        while True:
            if self.offset < self.size_bytes:
                length = min(CHUNK_BYTES, self.size_bytes - self.offset)
                # Without a unit, unlike HTTP's own header (distribution-spec 1.1, "Pushing a blob in chunks").
                headers = {"Content-Range": f"{self.offset}-{self.offset + length - 1}"}
                answer = self.request("PATCH", self.place, headers, length)
                if answer is not None and answer.status == 202:
                    before = self.offset
                    self.went_on(answer, self.offset + length)
                    if self.offset <= before:  # it has taken nothing, and may do so for ever
                        self.tries = self.tries.increment("PATCH", UPLOADS, response=answer)
                    continue
                if answer is not None and answer.status in NO_CHUNKS and self.offset == 0:
                    return False
            else:
                answer = self.request("PUT", self.closing(), {}, 0)
                if answer is not None and answer.status == 201:
                    return True
            self.wait("PATCH", answer, allowed={_LOST, _ELSEWHERE})
            if self.offset == self.size_bytes and has_blob(self.registry, self.digest, self.size_bytes):
                return True  # only the answer was lost
            self.find_state()

    def whole(self) -> None:
        """Send it in one request."""
        while True:
            self.open()
            answer = self.request("PUT", self.closing(), {}, self.size_bytes)
            if answer is not None and answer.status == 201:
                return
            self.wait("PUT", answer, allowed={_LOST})

    def open(self) -> None:
        opened = self.registry.ask("POST", UPLOADS, accept=(202,), headers={"Content-Length": "0"})
        self.offset = self.furthest = 0
        self.opened += 1
        # It may be relative, and may have a query.
        self.place = urllib.parse.urljoin(self.registry.url(UPLOADS), opened.headers.get("Location", ""))

    def closing(self) -> str:
        return f"{self.place}{'&' if '?' in self.place else '?'}{urllib.parse.urlencode({'digest': self.digest})}"

    def went_on(self, answer: BaseHTTPResponse, offset: int) -> None:
        match = _RANGE.fullmatch(answer.headers.get("Range", ""))
        at = int(match[1]) + 1 if match else offset
        # Only tries without a chunk are counted, as long as it does not begin anew each time.
        if at > self.furthest and self.opened <= MOST_OPENED and self.sent <= MOST_TIMES * self.size_bytes:
            self.furthest = at
            self.tries = self.registry.retries
        self.offset = min(at, self.size_bytes)
        self.place = urllib.parse.urljoin(self.place, answer.headers.get("Location", ""))

    def find_state(self) -> None:
        """Ask how much has arrived, and begin anew where that is not known."""
        answer = self.request("GET", self.place, {}, 0)
        match = _RANGE.fullmatch(answer.headers.get("Range", "")) if answer is not None else None
        # "0-0" is sent for nothing as well as for one byte.
        if answer is None or answer.status not in (202, 204) or match is None or match[1] == "0":
            self.open()
        else:
            self.went_on(answer, self.offset)

    def request(self, method: str, url: str, headers: dict[str, str], length: int) -> BaseHTTPResponse | None:
        """One request with a part of the file; None where the connection was cut."""
        from urllib3.exceptions import HTTPError

        def count(read: int) -> None:
            self.sent += read

        # What is sent to may be gone after a failure: only connecting is tried again by urllib3 itself.
        once = self.registry.retries.new(total=None, connect=0, read=0, status=0, other=0, redirect=5)
        part = FilePart(self.content, self.offset if method == "PATCH" else 0, length, count)
        fields = {"Content-Length": str(length), "Content-Type": "application/octet-stream", **headers}
        self.failure: HTTPError | None = None
        try:
            return self.registry.send(method, url, fields, cast("IO[bytes]", part) if length else b"", once)
        except HTTPError as error:
            self.failure = error
            return None

    def wait(self, method: str, answer: BaseHTTPResponse | None, allowed: set[int]) -> None:
        """Wait before the next try.

        Raises:
            NetworkError: the registry refuses.
            urllib3.exceptions.MaxRetryError: it was tried often enough.
        """
        if answer is not None and answer.status not in TRANSIENT | allowed:
            elsewhere = redirected_to(answer, self.place)
            raise self.registry.refused(f"{method} {UPLOADS}", answer.status, whole_body(answer), elsewhere)
        self.tries = self.tries.increment(method, UPLOADS, response=answer, error=self.failure)
        self.tries.sleep(answer)
