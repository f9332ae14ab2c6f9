"""The document of an entry in a remote store: which files it has, under which key, and its record."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from envbuild.core.digests import sha256_file, short
from envbuild.core.errors import CheckRefusedError
from envbuild.core.text import quoted_command
from envbuild.core.validation import Digest, describe_errors
from envbuild.store.backend import EntryFile
from envbuild.store.entry_index import ENTRY_INDEX_FILE

SCHEMA = "envbuild.entry/1"
# Of a document; those of wheels have some 10 KB.
MOST_BYTES = 16 << 20


class Document(BaseModel):
    """What a remote store has of an entry besides its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_: Literal["envbuild.entry/1"] = Field(alias="schema", default="envbuild.entry/1")
    kind: str
    key: Digest
    # The key "shelf" is part of the format.
    index_path: tuple[str, ...] = Field(
        alias="shelf", description="what it can be looked for by, from the wide to the narrow"
    )
    files: tuple[EntryFile, ...] = Field(min_length=1)
    record: JsonValue = Field(description="the entry's own record, to be read without its files")

    def as_bytes(self) -> bytes:
        return (self.model_dump_json(by_alias=True, indent=1) + "\n").encode()

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files)


def describe(kind: str, key: str, index_path: tuple[str, ...], folder: Path, record: JsonValue) -> Document:
    """The document of a local entry, which holds plain files alone (``entry_index``)."""
    files = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != ENTRY_INDEX_FILE:
            files.append(EntryFile(name=name, digest=sha256_file(path), size_bytes=path.stat().st_size))
    return Document(kind=kind, key=key, shelf=index_path, files=tuple(files), record=record)


def read_document(raw: bytes, kind: str, key: str, where: str) -> Document:
    """Read the document that a store has under a kind and key.

    Raises:
        CheckRefusedError: it is damaged, or belongs to another entry.
    """
    try:
        document = Document.model_validate_json(raw)
        names = [file.name for file in document.files]
        if len(set(names)) != len(names):
            raise refused(kind, key, where, "Its document has a file twice.")
    except ValidationError as error:
        raise refused(kind, key, where, f"Its document cannot be read: {describe_errors(error)}.") from error
    if (document.kind, document.key) != (kind, key):
        raise refused(kind, key, where, f"It is {document.kind} {short(document.key)}, kept under another name.")
    return document


def refused(kind: str, key: str, where: str, why: str) -> CheckRefusedError:
    """The error for an entry of a remote store that is not what it should be."""
    push = quoted_command("envbuild", kind, "push", short(key), "--store", where, "--replace")
    return CheckRefusedError(
        f"{kind} {short(key)} of the store {where} is refused",
        why=why,
        fix=f"It was not taken. With a good one here, `{push}` puts that in its place; otherwise it has to be "
        "removed there.",
    )
