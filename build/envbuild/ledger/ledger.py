"""The ledger: rows in, rows out, merged by key."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from envbuild.catalog.context import utc_now
from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.core import jsonread
from envbuild.core.digests import Json
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.core.validation import describe_errors
from envbuild.ledger.database import DAMAGED, connect, database_errors, in_memory, transaction
from envbuild.ledger.models import ROW_TYPES, Row

if TYPE_CHECKING:
    from typing_extensions import Self

FILE = "ledger.sqlite"
SCHEMA = "envbuild.ledger/1"
R = TypeVar("R", bound=Row)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Unsent:
    """A row that shared state lacks, and the number of its last write here."""

    row: Row
    revision: int


class Ledger:
    """The record of a site. Several processes may write it; each call is whole or did not happen."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """The ledger at a path, to be read and written; made where it is missing.

        Raises:
            CheckRefusedError: it is damaged, or of a newer envbuild.
            MachineError: it cannot be written, or the disk is full.
        """
        return cls(connect(path), path)

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """The ledger at a path, to be read; an empty one where there is no file.

        Raises:
            CheckRefusedError: it is damaged, or of a newer envbuild.
            MachineError: it cannot be read.
        """
        return cls.open(path) if path.exists() else cls(in_memory(), path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def record(self, *rows: Row) -> int:
        """Write rows, all or none; how many were new or replaced one of their key."""
        # One process at a time is between the read and the write.
        with transaction(self._connection, self.path):
            return sum(self._put(row) for row in rows)

    def rows(
        self, kind: type[R], *, stack: str | None = None, target: str | None = None, newest: int | None = None
    ) -> tuple[R, ...]:
        """Rows of a kind, oldest first.

        Args:
            newest: at most so many, the last ones.

        Raises:
            CheckRefusedError: the ledger is damaged.
        """
        where = {"stack": stack, "target": target}
        given = {name: value for name, value in where.items() if value is not None}
        # Names of tables and columns are constants of this package.
        condition = " AND ".join(f"{name} = ?" for name in given) or "1"
        # The newest first, for the limit; turned round below.
        order = f"moment DESC, {kind.within_a_second} DESC, key DESC"
        query = f"SELECT body FROM {kind.table} WHERE {condition} ORDER BY {order} LIMIT ?"  # noqa: S608
        # A negative limit is none (SQLite, "lang_select", LIMIT).
        limit = -1 if newest is None else newest
        with database_errors(self.path):
            rows = self._connection.execute(query, (*given.values(), limit)).fetchall()
        return tuple(self._row(kind, body) for (body,) in reversed(rows))

    def get(self, kind: type[R], key: str) -> R | None:
        """The row of a key."""
        with database_errors(self.path):
            row = self._connection.execute(f"SELECT body FROM {kind.table} WHERE key = ?", (key,)).fetchone()  # noqa: S608
        return None if row is None else self._row(kind, row[0])

    def export(self) -> dict[str, Json]:
        """Everything, as one JSON value: the rows of each table by their keys' order."""
        tables: dict[str, Json] = {}
        # One transaction: the tables belong together.
        with database_errors(self.path):
            self._connection.execute("BEGIN")
            try:
                for kind in ROW_TYPES:
                    rows = self._connection.execute(f"SELECT body FROM {kind.table} ORDER BY key").fetchall()  # noqa: S608
                    tables[kind.table] = [jsonread.loads(body) for (body,) in rows]
            finally:
                # Nothing was written: this ends it.
                self._connection.execute("ROLLBACK")
        return {"schema": SCHEMA, **tables}

    def forget(self, rows: Iterable[Row]) -> int:
        """Remove rows; how many there were."""
        with transaction(self._connection, self.path):
            return sum(
                self._connection.execute(f"DELETE FROM {row.table} WHERE key = ?", (row.key,)).rowcount  # noqa: S608
                for row in rows
            )

    def merged(self, address: str) -> frozenset[str]:
        """The entries of shared state at an address that are in this ledger."""
        with database_errors(self.path):
            rows = self._connection.execute("SELECT key FROM merged WHERE address = ?", (address,)).fetchall()
        return frozenset(key for (key,) in rows)

    def merge(self, rows: Iterable[Row], address: str, keys: Iterable[str]) -> int:
        """Write rows of shared state, and that they are here and there; how many changed something."""
        changed = 0
        with transaction(self._connection, self.path):
            for row in rows:
                changed += self._put(row)
                # Where a newer one is here, the place lacks that.
                query = f"INSERT OR REPLACE INTO known SELECT ?, ?, key, revision FROM {row.table} WHERE key = ? AND body = ?"  # noqa: S608, E501
                self._connection.execute(query, (address, row.table, row.key, row.body()))
            self._note_merged(address, keys)
        return changed

    def unsent(self, address: str) -> tuple[Unsent, ...]:
        """The rows that shared state at an address does not have, or not as they are here."""
        unsent: list[Unsent] = []
        with database_errors(self.path):
            for kind in ROW_TYPES:
                query = (
                    f"SELECT body, revision FROM {kind.table} AS own WHERE NOT EXISTS (SELECT 1 FROM known"  # noqa: S608
                    " WHERE address = ? AND kind = ? AND key = own.key AND revision = own.revision) ORDER BY key"
                )
                rows = self._connection.execute(query, (address, kind.table)).fetchall()
                unsent += [Unsent(self._row(kind, body), revision) for body, revision in rows]
        return tuple(unsent)

    def mark_sent(self, address: str, sent: Iterable[Unsent], key: str) -> None:
        """Note that shared state has rows, under ``key``."""
        with transaction(self._connection, self.path):
            self._connection.executemany(
                "INSERT OR REPLACE INTO known VALUES (?, ?, ?, ?)",
                [(address, row.row.table, row.row.key, row.revision) for row in sent],
            )
            self._note_merged(address, [key])

    def forget_place(self, address: str) -> None:
        """Forget what shared state at an address has: it is read again."""
        with transaction(self._connection, self.path):
            for table in ("merged", "known"):
                self._connection.execute(f"DELETE FROM {table} WHERE address = ?", (address,))  # noqa: S608

    def _note_merged(self, address: str, keys: Iterable[str]) -> None:
        self._connection.executemany("INSERT OR IGNORE INTO merged VALUES (?, ?)", [(address, key) for key in keys])

    def _put(self, row: Row) -> bool:
        old = self.get(type(row), row.key)
        # Also where both are the same: what is not written has no new revision, and is not sent again.
        if old is not None and old.rank() >= row.rank():
            return False
        self._connection.execute("UPDATE counter SET revision = revision + 1")
        self._connection.execute(
            f"INSERT OR REPLACE INTO {row.table} VALUES (?, ?, ?, ?, (SELECT revision FROM counter), ?)",  # noqa: S608
            (row.key, row.stack, row.of_target, row.moment, row.body()),
        )
        return True

    def _row(self, kind: type[R], body: str) -> R:
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise CheckRefusedError(
                f"the ledger {self.path} is damaged",
                why=f"A row of {kind.table} cannot be read: {describe_errors(error)}.",
                fix="Make it anew from what is published: envbuild ledger rebuild --from REGISTRY/REPO",
                reason=DAMAGED,
            ) from error


def grouped(rows: Iterable[R], key: Callable[[R], K]) -> dict[K, list[R]]:
    """Rows by a key, each group in their order."""
    groups: defaultdict[K, list[R]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(groups)


def rows_of(exported: Any, where: str) -> list[Row]:
    """The rows of what :meth:`Ledger.export` gave.

    Raises:
        CheckRefusedError: it is not an export, or one of a newer envbuild.
    """
    fix = "Update envbuild, or export it again where it is from."
    if not isinstance(exported, dict) or exported.get("schema") != SCHEMA:
        schema = exported.get("schema") if isinstance(exported, dict) else type(exported).__name__
        raise CheckRefusedError(
            f"{where} is not a ledger that this envbuild reads", why=f"It has {schema!r}, not {SCHEMA!r}.", fix=fix
        )
    try:
        return [kind.model_validate(row) for kind in ROW_TYPES for row in exported.get(kind.table, ())]
    except (ValidationError, TypeError) as error:
        why = describe_errors(error) if isinstance(error, ValidationError) else str(error)
        raise CheckRefusedError(f"{where} has a row that cannot be read", why=f"{why}.", fix=fix) from error


@contextlib.contextmanager
def made_anew(path: Path) -> Iterator[Ledger]:
    """A new ledger, which takes the place of the one at ``path`` when the block is done; the old one keeps its rows.

    What can be read of the old one is in the new one; a damaged file stays next to it under another name.
    """
    with machine_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new.{os.getpid()}")
        _unlink(new)
    try:
        with Ledger.open(new) as ledger:
            ledger.record(*_salvaged(path))
            yield ledger
        _replace(path, new)
    finally:
        _unlink(new)


def _salvaged(path: Path) -> list[Row]:
    """The rows of a ledger that may be damaged, as far as they can be read."""
    if not path.is_file():
        return []
    try:
        old = Ledger.open(path)
    except CheckRefusedError as error:
        # What a newer envbuild wrote is no damage.
        if error.reason != DAMAGED:
            raise
        return []
    rows: list[Row] = []
    with old:
        for kind in ROW_TYPES:
            # Table by table: of a damaged one the others may be whole.
            with contextlib.suppress(CheckRefusedError):
                rows += old.rows(kind)
    return rows


def _replace(path: Path, new: Path) -> None:
    with machine_errors(path):
        if path.exists():
            old = path.with_name(f"{path.name}.before-{utc_now().strftime(MOMENT_FORMAT)}")
            # The write-ahead log belongs to its database by name ("wal.html", 4).
            for suffix in ("-wal", "-shm", ""):
                if (source := path.with_name(path.name + suffix)).exists():
                    source.replace(old.with_name(old.name + suffix))
        new.replace(path)


def _unlink(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", ".lock"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
