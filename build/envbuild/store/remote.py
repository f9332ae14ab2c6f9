"""A remote store: entries are fetched and checked file by file, and pushed so that the first writer wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from pydantic import JsonValue

from envbuild.core.background import run_in_background
from envbuild.core.digests import sha256_file
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.store.backend import Backend, EntryRef
from envbuild.store.document import Document, describe, read_document, refused

REQUESTS_AT_ONCE = 8


class Pushed(str, Enum):
    NEW = "pushed"
    SAME = "there already"
    OTHER = "another one is there"
    REPLACED = "replaced a damaged one"


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A remote store and what it is used for.

    Attributes:
        name: its address, or what the site's configuration calls it.
        reads: entries that are not here are looked for there.
        writes: entries that were made here are put there.
    """

    backend: Backend
    address: str
    name: str
    reads: bool = True
    writes: bool = False

    def find(self, kind: str, key: str) -> Document | None:
        """The document of an entry, checked; None when there is none.

        Raises:
            CheckRefusedError: it is damaged, or another entry's.
            NetworkError: the store cannot be reached or refuses.
        """
        raw = self.backend.read(kind, key)
        return None if raw is None else read_document(raw, kind, key, self.address)

    def fetch(self, document: Document, folder: Path) -> None:
        """Put the files of an entry into a folder, each compared with the document.

        Raises:
            CheckRefusedError: a file is missing or is another one.
            NetworkError: the store cannot be reached or refuses.
            MachineError: the disk is full.
        """
        for file in document.files:
            path = folder / file.name
            with machine_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            if not self.backend.download(file.digest, file.size_bytes, path):
                raise refused(document.kind, document.key, self.address, f"Its file {file.name} is missing there.")
            # The size first: hashing a file of many gigabytes is not worth it when its length is wrong.
            size = path.stat().st_size
            if size != file.size_bytes:
                why = f"Its file {file.name} has {size} bytes instead of {file.size_bytes}."
            elif sha256_file(path) != file.digest:
                why = f"Its file {file.name} has another digest than the entry states."
            else:
                continue
            raise refused(document.kind, document.key, self.address, why)

    def push(
        self,
        kind: str,
        key: str,
        index_path: tuple[str, ...],
        folder: Path,
        record: JsonValue,
        *,
        replace: Callable[[Document | None], bool] = lambda _: False,
    ) -> Pushed:
        """Put a local entry there, unless one of its key is there: the first one stays.

        Args:
            replace: asked when an entry is there, with its document (None: unreadable), whether it must give way.

        Raises:
            CheckRefusedError: what is there under the key is damaged, and is not to be replaced.
            NetworkError: the store cannot be reached or refuses.
        """
        mine = describe(kind, key, index_path, folder, record)
        document, problem = self._present(kind, key)
        if (document or problem) and replace(document):
            self._upload(mine, folder, anew=True)
            self.backend.replace(kind, key, index_path, mine.as_bytes(), mine.files)
            return Pushed.REPLACED
        if problem:
            raise problem
        if document is None:
            self._upload(mine, folder, anew=False)
            # Only now: what a document names must be there before it.
            if self.backend.create(kind, key, index_path, mine.as_bytes(), mine.files):
                return Pushed.NEW
            document = self.find(kind, key)
        return Pushed.SAME if document is not None and document.files == mine.files else Pushed.OTHER

    def _present(self, kind: str, key: str) -> tuple[Document | None, CheckRefusedError | None]:
        try:
            return self.find(kind, key), None
        except CheckRefusedError as error:
            return None, error

    def _upload(self, document: Document, folder: Path, *, anew: bool) -> None:
        for file in document.files:
            # Anew, since a blob of the right size may be what is damaged: `has` does not read it.
            if anew or not self.backend.has(file.digest, file.size_bytes):
                self.backend.upload(folder / file.name, file.digest, file.size_bytes)

    def keys(self, kind: str) -> list[str]:
        return sorted(self.backend.keys(kind))

    def list_index(self, kind: str, index_path: tuple[str, ...]) -> list[EntryRef]:
        """The entries under a path of the index; an entry that is listed may not be there."""
        return sorted(self.backend.list_index(kind, index_path))

    def documents(self, kind: str, keys: list[str]) -> dict[str, Document | CheckRefusedError]:
        """The documents of several entries, or why each cannot be taken; those that are not there are left out."""

        def read(share: list[str]) -> list[tuple[str, tuple[Document | None, CheckRefusedError | None]]]:
            return [(key, self._present(kind, key)) for key in share]

        # Daemon threads: Ctrl-C ends the command though a store does not answer.
        shares = [keys[start::REQUESTS_AT_ONCE] for start in range(min(REQUESTS_AT_ONCE, len(keys)))]
        working = [run_in_background(partial(read, share)) for share in shares]
        documents = dict(pair for work in working for pair in work.result())
        return {key: entry for key in keys if (entry := documents[key][0] or documents[key][1]) is not None}
