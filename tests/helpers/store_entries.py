"""Entries of no particular kind for tests of remote stores, and the places they go to."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from helpers.fault_proxy import FaultProxy
from helpers.stores import PASSWORD, S3_KEYS

from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import EnvbuildError
from envbuild.store.connect import open_remote
from envbuild.store.document import Document
from envbuild.store.remote import Pushed, Remote

KEY, OTHER_KEY = sha256_bytes(b"one"), sha256_bytes(b"other")
INDEX_PATH = ("sdist", "fit")
BIG = os.urandom(3_000_000)
SECRETS = (S3_KEYS["AWS_SECRET_ACCESS_KEY"], "open-sesame-gs", PASSWORD, "YWxpOm9wZW4gc2VzYW1l")


@dataclass
class Place:
    """A store of one kind that is empty, and what is in front of its server."""

    url: str
    endpoint: str | None = None
    proxy: FaultProxy = field(default_factory=FaultProxy)

    def open(self, **changes: object) -> Remote:
        return open_remote(self.url, endpoint=self.endpoint, **changes)  # type: ignore[arg-type]


def entry(folder: Path, text: str = "content", big: bytes = BIG) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "small.txt").write_text(text)
    (folder / "inner/big.bin").write_bytes(big)
    (folder / ".sealed.json").write_text("{}")
    return folder


def push(remote: Remote, folder: Path, key: str = KEY, **changes: object) -> Pushed:
    return remote.push("things", key, INDEX_PATH, folder, {"about": "it"}, **changes)  # type: ignore[arg-type]


def fetched(remote: Remote, folder: Path) -> Document:
    document = remote.find("things", KEY)
    assert document is not None
    folder.mkdir()
    remote.fetch(document, folder)
    return document


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_error(error: EnvbuildError, *parts: str) -> None:
    """The error has what, why, and what to do, and no secret."""
    text = f"{error.what}\n{error.why}\n{error.fix}"
    assert all(part in text for part in parts), text
    assert all((error.what, error.why, error.fix))
    assert not [secret for secret in SECRETS if secret in text]
