"""Real git repositories with forged histories, and a loopback server for them whose lines can be cut."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


@dataclass(frozen=True)
class Symlink:
    target: str


@dataclass(frozen=True)
class Submodule:
    commit: str


Content = str | bytes | Symlink | Submodule | None


def git(folder: Path, *arguments: str, stdin: bytes | None = None) -> str:
    """Run git in a bare repository."""
    done = subprocess.run(["git", "--git-dir", folder, *arguments], input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


class History:
    """A bare repository written by git fast-import; dates are ISO texts with their zone (``2025-07-28T23:00:00Z``)."""

    def __init__(self, path: Path, *, filters: bool = True) -> None:
        self.path = path
        if path.exists():
            return
        subprocess.run(["git", "init", "-q", "--bare", "--initial-branch=main", path], check=True)
        git(path, "config", "uploadpack.allowFilter", str(filters).lower())
        git(path, "config", "core.hooksPath", "/dev/null")

    def commit(
        self,
        branch: str,
        when: str,
        files: Mapping[str, Content] | None = None,
        *,
        parents: tuple[str, ...] | None = None,
        authored: str | None = None,
    ) -> str:
        """A commit on top of ``branch`` (or of ``parents``; the first is the first parent); returns its hash."""
        if parents is None:
            parents = tuple(filter(None, [git(self.path, "for-each-ref", "--format=%(objectname)", _head(branch))]))
        lines = [
            f"commit {_head(branch)}",
            f"author A <a@x> {_stamp(authored or when)}",
            f"committer C <c@x> {_stamp(when)}",
        ]
        stream = ("\n".join(lines) + "\n").encode() + _data(b"a change")
        for word, parent in zip(["from", *["merge"] * len(parents)], parents, strict=False):
            stream += f"{word} {parent}\n".encode()
        if not parents:
            stream = f"reset {_head(branch)}\n".encode() + stream
        for name, content in (files or {}).items():
            stream += _change(name, content)
        self._import(stream)
        return git(self.path, "rev-parse", _head(branch))

    def tag(self, name: str, commit: str, *, annotated: bool = False) -> None:
        if annotated:
            stream = f"tag {name}\nfrom {commit}\ntagger T <t@x> {_stamp('2030-01-01T00:00:00Z')}\n".encode()
            self._import(stream + _data(b"a tag"))
        else:
            git(self.path, "update-ref", f"refs/tags/{name}", commit)

    def branch(self, name: str, commit: str | None) -> None:
        """Set a branch; None removes it."""
        git(self.path, "update-ref", *(["-d", _head(name)] if commit is None else [_head(name), commit]))

    def colliding(self, first: str, second: str, digits: int = 7) -> tuple[str, str]:
        """Two objects of these kinds (``commit`` or ``tree``) whose names begin alike, written into the repository."""
        known: dict[str, bytes] = {}
        for number in itertools.count():
            body = _body(first, f"first{number}")
            known[_name(first, body)[:digits]] = body
            body = _body(second, f"second{number}")
            if other := known.get(_name(second, body)[:digits]):
                return self._write(first, other), self._write(second, body)
        raise AssertionError

    def _write(self, kind: str, body: bytes) -> str:
        return git(self.path, "hash-object", "-t", kind, "-w", "--stdin", stdin=body)

    def _import(self, stream: bytes) -> None:
        git(self.path, "fast-import", "--quiet", "--force", stdin=stream)


def _body(kind: str, label: str) -> bytes:
    if kind == "tree":
        return f"40000 {label}".encode() + b"\0" + bytes.fromhex(EMPTY_TREE)
    who = "A <a@x> 1700000000 +0000"
    return f"tree {EMPTY_TREE}\nauthor {who}\ncommitter {who}\n\n{label}\n".encode()


def _name(kind: str, body: bytes) -> str:
    return hashlib.sha1(b"%s %d\0%s" % (kind.encode(), len(body), body)).hexdigest()


def _head(branch: str) -> str:
    return f"refs/heads/{branch}"


def _stamp(when: str) -> str:
    moment = datetime.fromisoformat(when.replace("Z", "+00:00"))
    return f"{int(moment.timestamp())} {moment:%z}"


def _data(content: bytes) -> bytes:
    return b"data %d\n%s\n" % (len(content), content)


def _change(name: str, content: Content) -> bytes:
    quoted = '"' + name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if content is None:
        return f"D {quoted}\n".encode()
    if isinstance(content, Submodule):
        return f"M 160000 {content.commit} {quoted}\n".encode()
    if isinstance(content, Symlink):
        return f"M 120000 inline {quoted}\n".encode() + _data(content.target.encode())
    raw = content.encode() if isinstance(content, str) else content
    return f"M 100644 inline {quoted}\n".encode() + _data(raw)


@dataclass
class GitServer:
    """``git daemon`` on loopback, a process a connection.

    Attributes:
        cut_after: bytes of an answer after which the line is cut.
        cut_only: the number of the one connection that is cut, from 1; 0 for all.
        stall_after: bytes of an answer after which the server falls silent; ``stalled`` is set then.
        connections: how many there were.
    """

    folder: Path
    cut_after: int | None = None
    cut_only: int = 0
    stall_after: int | None = None
    connections: int = 0
    stalled: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    _closing: threading.Event = field(default_factory=threading.Event)

    def url(self, name: str) -> str:
        return f"git://127.0.0.1:{self.port}/{name}"

    def accept(self, listener: socket.socket) -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            cut_after = self.cut_after if self.cut_only in (0, self.connections) else None
            threading.Thread(target=self._serve, args=(line, cut_after), daemon=True).start()

    def _serve(self, line: socket.socket, cut_after: int | None) -> None:
        command = ["git", "daemon", "--inetd", "--export-all", "--log-destination=none", f"--base-path={self.folder}"]
        with subprocess.Popen([*command, self.folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon, line:
            assert daemon.stdin is not None
            assert daemon.stdout is not None
            source, sink = daemon.stdout, daemon.stdin
            threading.Thread(target=_pump, args=(lambda: line.recv(65536), sink), daemon=True).start()
            sent = 0
            while chunk := os.read(source.fileno(), 512):
                for limit in filter(None, (cut_after, self.stall_after)):
                    if sent + len(chunk) <= limit:
                        continue
                    if limit == self.stall_after:
                        self.stalled.set()
                        self._closing.wait(300)
                    daemon.kill()
                    with contextlib.suppress(OSError):
                        line.shutdown(socket.SHUT_RDWR)
                    return
                try:
                    line.sendall(chunk)
                except OSError:
                    daemon.kill()
                    return
                sent += len(chunk)
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing.set()


def _pump(read: Callable[[], bytes], sink: object) -> None:
    with contextlib.suppress(OSError, ValueError):
        while chunk := read():
            sink.write(chunk)  # type: ignore[attr-defined]
            sink.flush()  # type: ignore[attr-defined]
        sink.close()  # type: ignore[attr-defined]


@contextlib.contextmanager
def git_server(folder: Path) -> Iterator[GitServer]:
    """Serve the repositories in ``folder`` while the block runs."""
    server = GitServer(folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.port = listener.getsockname()[1]
        thread = threading.Thread(target=server.accept, args=(listener,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.close()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=10)


def git_settings(monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, str]) -> None:
    """Git settings for this process and all below it, through the environment."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(settings)))
    for number, (name, value) in enumerate(settings.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", name)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
