"""A package index on loopback (PEP 691) with upload times and yanked files, and small sdists for it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import io
import json
import re
import tarfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.loopback import serving
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

JSON_TYPE = "application/vnd.pypi.simple.v1+json"


def make_sdist(
    folder: Path,
    name: str,
    version: str,
    *,
    requires: tuple[str, ...] = (),
    extras: tuple[str, ...] = (),
    pyproject: str | None = None,
    stated: tuple[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    metadata: str = "2.2",
) -> Path:
    """An sdist; ``stated`` is the name and version in its PKG-INFO when they are not the file's.

    With ``metadata`` below 2.2, a PKG-INFO without requirements does not mean that there are none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stated_name, stated_version = stated or (name, version)
    info = f"Metadata-Version: {metadata}\nName: {stated_name}\nVersion: {stated_version}\n"
    info += "".join(f"Requires-Dist: {line}\n" for line in requires)
    info += "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    texts = {"PKG-INFO": info, **({"pyproject.toml": pyproject} if pyproject is not None else {}), **(files or {})}
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, text in texts.items():
            member = tarfile.TarInfo(f"{name}-{version}/{file}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@dataclass
class _File:
    path: Path
    uploaded: str | None
    yanked: bool = False
    digest: str = ""
    python: str = ""


@dataclass
class SimpleIndex:
    """What the index has now; changes are seen by the next request.

    Attributes:
        requested: the paths that were asked for.
        password: ``user:password`` without which it answers nothing but 401.
        caching: its Cache-Control: answers may be kept, and are asked for again, as with the index that everyone uses.
        changes: what is done to the answer for a project before it is sent.
        bodies: status, content type and body in the place of the answer for a path.
        statuses: the status of an answer without a body, by path.
        redirects: where the answer for a path sends to.
        special: what answers a path itself, with the request's handler; false: the usual answer follows.
        after: paths that it answers only once another one was asked for too.
    """

    address: str = ""
    password: str = ""
    caching: str = "no-cache"
    special: dict[str, Callable[[http.server.BaseHTTPRequestHandler], bool]] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    changes: dict[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    bodies: dict[str, tuple[int, str, bytes]] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    requested: list[str] = field(default_factory=list)
    _files: dict[str, _File] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"{self.address}/simple"

    def add(self, file: Path, uploaded: str | None) -> None:
        """Upload a file, at a time such as ``2026-01-02T00:00:00Z``; None: the index does not say when."""
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        self._files[file.name] = _File(file, uploaded, digest=digest, python=_python(file))

    def yank(self, name: str) -> None:
        self._files[name].yanked = True

    def remove(self, name: str) -> None:
        del self._files[name]

    def page(self, project: str) -> dict[str, Any] | None:
        """The answer for a project; None when it has no file."""
        files = [file for name, file in self._files.items() if _project(name) == project]
        if not files:
            return None
        return {
            "meta": {"api-version": "1.1"},
            "name": project,
            "files": [
                {
                    "filename": file.path.name,
                    "url": f"{self.address}/files/{file.path.name}",
                    "hashes": {"sha256": file.digest},
                    "yanked": file.yanked,
                    "size": file.path.stat().st_size,
                    **({"upload-time": file.uploaded} if file.uploaded else {}),
                    **({"requires-python": file.python} if file.python else {}),
                }
                for file in files
            ],
        }

    def answer(self, path: str) -> tuple[int, str, bytes] | None:
        """The status, content type and body for a path."""
        self.requested.append(path)
        deadline = time.monotonic() + 300
        while path in self.after and self.after[path] not in self.requested:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        if path in self.bodies:
            return self.bodies[path]
        if path in self.statuses:
            return self.statuses[path], "text/plain", b""
        if path in self.redirects:
            return 302, "text/plain", b""
        match path.strip("/").split("/"):
            case ["simple", project] if (page := self.page(project)) is not None:
                return 200, JSON_TYPE, json.dumps(self.changes.get(project, dict)(page)).encode()
            case ["files", name] if name in self._files:
                return 200, "application/octet-stream", self._files[name].path.read_bytes()
        return None


def _python(file: Path) -> str:
    """The Pythons that a wheel's METADATA names, as an index states them on its page."""
    if file.suffix != ".whl" or not zipfile.is_zipfile(file):
        return ""
    with zipfile.ZipFile(file) as archive:
        texts = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    match = re.search(r"^Requires-Python: (.+)$", "\n".join(texts), re.MULTILINE)
    return match[1] if match else ""


def _project(file: str) -> str:
    parsed = parse_wheel_filename(file) if file.endswith(".whl") else parse_sdist_filename(file)
    return canonicalize_name(parsed[0])


@contextlib.contextmanager
def simple_index() -> Iterator[SimpleIndex]:
    """An empty index on loopback while the block runs."""
    index = SimpleIndex()
    # uv keeps answers by address, and ports are used again: an address of its own, for a cache that tests share.
    prefix = f"/{uuid.uuid4().hex}"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.removeprefix(prefix)
            known = base64.b64encode(index.password.encode()).decode()
            if index.password and self.headers.get("Authorization") != f"Basic {known}":
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="index"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if path in index.special and index.special[path](self):
                index.requested.append(path)
                return
            actual = index.answer(path)
            status, kind, body = actual or (404, "text/plain", b"")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", index.caching)
            if status == 302:
                self.send_header("Location", index.redirects[path])
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with serving(Handler) as server:
        index.address = f"http://127.0.0.1:{server.server_port}{prefix}"
        yield index
