"""What a remote store must be able to do: keep files by digest, and one small document for each entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Protocol, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from envbuild.core.validation import Digest
from envbuild.store.entry_index import ENTRY_INDEX_FILE

# Folders of a store. The index finds entries by what they are for; its name "shelves" is part of the format.
ENTRIES, INDEX, BLOBS = "entries", "shelves", "blobs/sha256"
# The folder of what is changed in its place.
CELLS = "cells"


def _inside(name: str) -> str:
    """A file name that leads to no place outside its entry."""
    # Whoever can write to a store chooses these names, and files are written to them.
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name or name in (".", ENTRY_INDEX_FILE):
        raise ValueError(f"{name!r} is not the name of a file inside an entry")
    return name


class EntryFile(BaseModel):
    """A file of an entry, by what is in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, AfterValidator(_inside)] = Field(min_length=1, max_length=1024)
    digest: Digest
    size_bytes: int = Field(ge=0)


EntryFiles: TypeAlias = Sequence[EntryFile]


@dataclass(frozen=True, order=True)
class EntryRef:
    """An entry as a listing has it: its key, and where in the index it was found."""

    key: str
    index_path: tuple[str, ...]


@dataclass(frozen=True)
class StoredObject:
    """A small object of a store, as it was read.

    Attributes:
        version: what the store calls this content; :meth:`ObjectStore.replace` compares it.
        modified: when it was written, by the store's own clock.
    """

    content: bytes
    version: Mapping[str, str] = field(repr=False)
    modified: datetime


class ObjectStore(Protocol):
    """Objects by their paths (``a/b/c``), with conditional writes: a bucket, or a directory that machines share.

    All methods raise NetworkError when the place cannot be reached or refuses, MachineError when a file cannot be read
    or written, and NotPlainFileError for what is no object, or is larger than allowed.
    """

    @property
    def address(self) -> str:
        """Where it is, for people."""

    def read(self, path: str, at_most_bytes: int) -> StoredObject | None:
        """A small object; None when there is none."""

    def create(self, path: str, content: bytes) -> bool:
        """Put a small object there, unless there is one: False, and the one that is there stays."""

    def replace(self, path: str, content: bytes, of: StoredObject) -> bool:
        """Put a small object in the place of one that was read: False if that is another one now, which stays."""

    def write(self, path: str, content: bytes) -> None:
        """Put a small object there, in the place of what is there."""

    def remove(self, path: str) -> None:
        """Remove an object; nothing where there is none."""

    def names(self, prefix: str) -> list[str]:
        """The paths of all objects below a folder."""

    def size(self, path: str) -> int | None:
        """The size of an object in bytes; None when there is none."""

    def upload(self, file: Path, path: str, size_bytes: int) -> None:
        """Put a file there, in the place of what is there."""

    def download(self, path: str, size_bytes: int, to: Path, start: int = 0) -> bool:
        """Write an object to a local file, or what follows its first ``start`` bytes to the end of that file.

        Not more than one chunk beyond ``size_bytes`` is taken. What came is for the caller to check. False when there
        is no object.
        """

    def has_conditions(self) -> bool:
        """Whether it keeps to the conditions of :meth:`create` and :meth:`replace`; some services do not."""

    def now(self) -> datetime:
        """The store's own time, with which :attr:`StoredObject.modified` is compared."""


class Cell(Protocol):
    """A small object of a store that several writers change, each only where it is still what that writer has read.

    No content may be written twice: by it a writer knows its own write, also where the answer was lost. All methods
    raise NetworkError when the place cannot be reached or refuses.
    """

    @property
    def removal(self) -> str:
        """How a person removes it: ``remove s3://...``."""

    def read(self) -> StoredObject | None:
        """What it holds; None when it is not there."""

    def create(self, content: bytes) -> bool:
        """Make it, unless it is there: False."""

    def replace(self, content: bytes, of: StoredObject) -> bool:
        """Change it, unless it is another one than was read: False.

        Where the store has no conditional writes, also False after one that took too long to be sure: what is there
        then is to be read again.
        """

    def now(self) -> datetime:
        """The store's own time."""


class Backend(Protocol):
    """A place for entries. An entry is there when its document is; what a document names was put there before it.

    All methods raise NetworkError when the place cannot be reached or refuses, and MachineError when a local file
    cannot be written.
    """

    def read(self, kind: str, key: str) -> bytes | None:
        """The document of an entry; None when there is no such entry."""

    def create(self, kind: str, key: str, index_path: tuple[str, ...], document: bytes, files: EntryFiles) -> bool:
        """Put the document of an entry there, unless there is one: False, and the one that is there stays."""

    def replace(self, kind: str, key: str, index_path: tuple[str, ...], document: bytes, files: EntryFiles) -> None:
        """Put the document of an entry in the place of a damaged one."""

    def keys(self, kind: str) -> list[str]:
        """The keys of all entries."""

    def list_index(self, kind: str, index_path: tuple[str, ...]) -> list[EntryRef]:
        """The entries under a path of the index; some of them may not be there any more."""

    def has(self, digest: str, size_bytes: int) -> bool:
        """Whether a file of this digest and size is there."""

    def upload(self, file: Path, digest: str, size_bytes: int) -> None:
        """Put a file there, under its digest."""

    def download(self, digest: str, size_bytes: int, to: Path) -> bool:
        """Write what is kept under a digest to a local file, unchecked; False when there is nothing."""

    def cell(self, name: str) -> Cell:
        """The cell of a name."""
