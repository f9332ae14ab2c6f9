"""Every difference of the files of two images. Both are put into a database on disk, so memory stays small."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.digests import Json
from envbuild.core.files import machine_errors
from envbuild.core.text import printable
from envbuild.oci.image import Image
from envbuild.rootfs.members import Kind, Member, name_bytes
from envbuild.rootfs.overlay import merged
from envbuild.rootfs.stream import Content

BATCH = 10_000
_FIELDS = ("kind", "content", "mode", "owner", "link", "xattrs", "mtime")
# Names are BLOBs: they need not be UTF-8, and sort by their bytes.
_COLUMNS = "name BLOB PRIMARY KEY, kind TEXT, content TEXT, mode TEXT, owner TEXT, link BLOB, xattrs TEXT, mtime TEXT"
Row = tuple[bytes, str, str, str, str, bytes, str, str]


@dataclass(frozen=True, kw_only=True)
class FileDifference:
    """A name that is not the same in two images.

    Attributes:
        what: ``added``, ``removed`` or ``changed``; ``fields``: of what changed, old and new value.
    """

    path: str
    what: str
    fields: dict[str, tuple[str, str]]

    def as_json(self) -> dict[str, Json]:
        return {"path": self.path, "what": self.what, "fields": {**self.fields}}

    def line(self) -> str:
        changes = ", ".join(
            f"{name} {printable(old) or '-'} -> {printable(new) or '-'}" for name, (old, new) in self.fields.items()
        )
        return f"{self.what}: {printable(self.path)}" + (f"  {changes}" if changes else "")


def different_files(old: Image, new: Image, scratch: Path, *, times: bool) -> Iterator[FileDifference]:
    """What differs between the files that containers of two images see, sorted by the names' bytes.

    Args:
        scratch: where the database is put.
        times: whether a time alone makes a difference.

    Raises:
        CheckRefusedError: a layer of either is damaged, or holds what no layer may.
    """
    file = scratch / "files.sqlite"
    # isolation_level=None: the module begins no transactions by itself, so that a table is filled in one.
    with machine_errors(file), closing(sqlite3.connect(file, isolation_level=None)) as base:
        # A scratch file: what a crash leaves of it is removed, so nothing is written twice or waits for the disk.
        base.execute("PRAGMA journal_mode = OFF")
        base.execute("PRAGMA synchronous = OFF")
        for table, image in (("old", old), ("new", new)):
            _fill(base, table, image)
        yield from _differences(base, times=times)


def _fill(base: sqlite3.Connection, table: str, image: Image) -> None:
    # WITHOUT ROWID: rows lie in the order of their names, and there is no second index (sqlite.org/withoutrowid.html).
    base.execute(f"CREATE TABLE {table} ({_COLUMNS}) WITHOUT ROWID")
    base.execute("BEGIN")
    batch: list[Row] = []
    for member, content in _members(image):
        if not member.name:
            continue  # the root itself: many layers have no entry for it
        batch.append(_row(member, content))
        if len(batch) == BATCH:
            _insert(base, table, batch)
            batch = []
    _insert(base, table, batch)
    # Hard links have what their file has; which of the names is the link is no difference.
    base.execute(
        f"UPDATE {table} SET (kind, content, mode, owner, xattrs, mtime, link) = "  # noqa: S608 - our own names
        f"(SELECT kind, content, mode, owner, xattrs, mtime, x'' FROM {table} AS file "
        f"WHERE file.name = {table}.link) WHERE kind = ?",
        (Kind.HARD_LINK.value,),
    )
    base.execute("COMMIT")


def _insert(base: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    # REPLACE: where a layer has a file twice, `merged` yields it again, and the last one holds.
    base.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)  # noqa: S608 - our names


def _members(image: Image) -> Iterator[tuple[Member, Content | None]]:
    """What a container of the image sees."""
    blobs = [layer.blob for layer in image.layers if layer.blob is not None]
    if len(blobs) == len(image.layers):
        yield from merged(blobs)
    else:
        # A .sqsh is not a tar: its one layer is all that a container sees.
        for layer in image.layers:
            yield from layer.members()


def _row(member: Member, content: Content | None) -> Row:
    digest = ""
    if content is not None:
        sha256 = hashlib.sha256()
        for piece in content.pieces():
            sha256.update(piece)
        digest = f"sha256:{sha256.hexdigest()}"
    is_link = member.kind is Kind.SYMLINK
    return (
        name_bytes(member.name),
        member.kind.value,
        digest,
        # The mode of a symbolic link means nothing, and builders write what they like.
        "" if is_link else f"{member.mode:04o}",
        f"{member.uid}:{member.gid}",
        name_bytes(member.link),
        ",".join(member.xattrs),
        str(member.mtime),
    )


def _differences(base: sqlite3.Connection, *, times: bool) -> Iterator[FileDifference]:
    fields = _FIELDS if times else _FIELDS[:-1]
    pairs = ", ".join(f"old.{field}, new.{field}" for field in fields)
    unequal = " OR ".join(f"old.{field} <> new.{field}" for field in fields)
    query = (
        f"SELECT old.name AS name, 'changed', {pairs} FROM old JOIN new ON old.name = new.name WHERE {unequal}"  # noqa: S608
        f" UNION ALL SELECT name, 'removed'{', NULL' * 2 * len(fields)} FROM old"
        " WHERE NOT EXISTS (SELECT 1 FROM new WHERE new.name = old.name)"
        f" UNION ALL SELECT name, 'added'{', NULL' * 2 * len(fields)} FROM new"
        " WHERE NOT EXISTS (SELECT 1 FROM old WHERE old.name = new.name)"
        " ORDER BY name"
    )
    for name, what, *values in base.execute(query):
        changed = {
            field: (_text(before), _text(after))
            for field, before, after in zip(fields, values[::2], values[1::2], strict=True)
            if before != after
        }
        yield FileDifference(path=f"/{name.decode('utf-8', 'surrogateescape')}", what=what, fields=changed)


def _text(value: object) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
