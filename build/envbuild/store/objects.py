"""A remote store in a bucket, or in a directory of a shared file system."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath

from envbuild.core.digests import hex_of
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import NotPlainFileError
from envbuild.store.backend import (
    BLOBS,
    CELLS,
    ENTRIES,
    INDEX,
    Cell,
    EntryFiles,
    EntryRef,
    ObjectStore,
    StoredObject,
)
from envbuild.store.conditional import change_settled
from envbuild.store.document import MOST_BYTES, refused


class Objects:
    """Entries under ``entries/``, their files under ``blobs/sha256/``, the index as empty ones under ``shelves/``."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def read(self, kind: str, key: str) -> bytes | None:
        try:
            content = self._store.read(_entry(kind, key), MOST_BYTES)
        except NotPlainFileError as error:
            raise refused(kind, key, self._store.address, f"Its document is refused: {error}.") from error
        return None if content is None else content.content

    def create(self, kind: str, key: str, index_path: tuple[str, ...], document: bytes, files: EntryFiles) -> bool:  # noqa: ARG002
        # The index first: what it lists may be missing, but no entry is missing from it.
        self._store.write(_mark(kind, key, index_path), b"")
        return self._store.create(_entry(kind, key), document)

    def replace(self, kind: str, key: str, index_path: tuple[str, ...], document: bytes, files: EntryFiles) -> None:  # noqa: ARG002
        self._store.write(_mark(kind, key, index_path), b"")
        self._store.write(_entry(kind, key), document)

    def keys(self, kind: str) -> list[str]:
        paths = [PurePosixPath(path) for path in self._store.names(f"{ENTRIES}/{kind}")]
        return [f"sha256:{path.stem}" for path in paths if path.suffix == ".json"]

    def list_index(self, kind: str, index_path: tuple[str, ...]) -> list[EntryRef]:
        top = f"{INDEX}/{kind}/"
        paths = [path.removeprefix(top).split("/") for path in self._store.names("/".join([INDEX, kind, *index_path]))]
        return [EntryRef(f"sha256:{parts[-1]}", tuple(parts[:-1])) for parts in paths]

    def has(self, digest: str, size_bytes: int) -> bool:
        return self._store.size(_blob(digest)) == size_bytes

    def upload(self, file: Path, digest: str, size_bytes: int) -> None:
        self._store.upload(file, _blob(digest), size_bytes)

    def download(self, digest: str, size_bytes: int, to: Path) -> bool:
        try:
            return self._store.download(_blob(digest), size_bytes, to)
        except NotPlainFileError as error:
            raise CheckRefusedError(
                f"a file of the store {self._store.address} is refused",
                why=f"{error}, under {BLOBS}/.",
                fix="Remove it there; with a good wheel here `envbuild wheels push` puts the file back.",
            ) from error

    def cell(self, name: str) -> Cell:
        return ObjectCell(self._store, f"{CELLS}/{name}.json")


@dataclass(frozen=True)
class ObjectCell:
    """An object; the store compares it when it is replaced, where it can."""

    store: ObjectStore
    path: str

    @property
    def removal(self) -> str:
        return f"remove {self.store.address}/{self.path}"

    def read(self) -> StoredObject | None:
        try:
            return self.store.read(self.path, MOST_BYTES)
        except NotPlainFileError as error:
            raise CheckRefusedError(
                f"{self.store.address}/{self.path} is refused", why=f"{error}.", fix="Remove it there."
            ) from error

    def create(self, content: bytes) -> bool:
        if not self._has_conditions:
            return self._change(None, content)
        return self.store.create(self.path, content) or self._content() == content

    def replace(self, content: bytes, of: StoredObject) -> bool:
        if not self._has_conditions:
            return self._change(of.content, content)
        # One that was refused may be there: its answer was lost, and it was sent again.
        return self.store.replace(self.path, content, of) or self._content() == content

    @functools.cached_property
    def _has_conditions(self) -> bool:
        return self.store.has_conditions()

    def _change(self, before: bytes | None, after: bytes) -> bool:
        return change_settled(self._content, lambda: self.store.write(self.path, after), before, after)

    def _content(self) -> bytes | None:
        now = self.read()
        return None if now is None else now.content

    def now(self) -> datetime:
        return self.store.now()


def _entry(kind: str, key: str) -> str:
    return f"{ENTRIES}/{kind}/{hex_of(key)}.json"


def _mark(kind: str, key: str, index_path: tuple[str, ...]) -> str:
    return "/".join([INDEX, kind, *index_path, hex_of(key)])


def _blob(digest: str) -> str:
    return f"{BLOBS}/{hex_of(digest)}"
