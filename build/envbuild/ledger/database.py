"""The ledger's file: SQLite in WAL mode, its migrations, and its failures as errors that people understand."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from envbuild import __version__
from envbuild.core import locks
from envbuild.core.errors import CheckRefusedError, EnvbuildError, MachineError, disk_full
from envbuild.core.files import machine_errors, space_is_low

# Another writer has the ledger for milliseconds; a disk that stalls may make it minutes.
BUSY_SECONDS = 120
# Reasons of CheckRefusedError.
NEWER, DAMAGED, FOREIGN = "newer", "damaged", "foreign"
_TABLES = ("locks", "wheels", "images", "cases", "certificates", "publications", "nights", "steps", "bisects")
# One script for each version of the file; `PRAGMA user_version` counts those that it has had.
MIGRATIONS: tuple[str, ...] = (
    # What rows are found by is in columns; the rest is JSON, so that a new field needs no migration. WITHOUT ROWID: a
    # key that is a text would be kept twice otherwise (SQLite, "withoutrowid").
    "".join(  # noqa: S608 - of the names above
        f"CREATE TABLE {table} (key TEXT PRIMARY KEY, stack TEXT NOT NULL, target TEXT NOT NULL, moment TEXT NOT NULL,"
        f" revision INTEGER NOT NULL, body TEXT NOT NULL) WITHOUT ROWID;"
        f"CREATE INDEX {table}_found ON {table} (stack, target, moment);"
        f"CREATE INDEX {table}_revision ON {table} (revision);"
        for table in _TABLES
    )
    # The number of the last write.
    + "CREATE TABLE counter (revision INTEGER NOT NULL); INSERT INTO counter VALUES (0);"
    # What of shared state at an address is in here; and up to which revision it had what is in here.
    "CREATE TABLE merged (address TEXT NOT NULL, key TEXT NOT NULL, PRIMARY KEY (address, key)) WITHOUT ROWID;"
    "CREATE TABLE sent (address TEXT PRIMARY KEY, revision INTEGER NOT NULL) WITHOUT ROWID;",
    # Which rows shared state at an address has, as they were at a revision. Its entries are read again for it.
    """DROP TABLE sent; DELETE FROM merged;
    CREATE TABLE known (address TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, revision INTEGER NOT NULL,
    PRIMARY KEY (address, kind, key)) WITHOUT ROWID;""",
)


def connect(path: Path, migrations: Sequence[str] = MIGRATIONS) -> sqlite3.Connection:
    """The ledger at a path, brought to this version; made where it is missing.

    Raises:
        CheckRefusedError: it is damaged, not a ledger, or of a newer envbuild.
        MachineError: it cannot be read or written, or the disk is full.
    """
    with machine_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            # Not opened: closing it would release what SQLite has locked in it for this process (fcntl_locking(2)).
            os.mknod(path, 0o660 | stat.S_IFREG)
    with database_errors(path):
        # isolation_level=None: the module begins no transactions of its own, transaction() does.
        connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_SECONDS)
        try:
            # First: what is no ledger of ours stays as it is.
            version = _version(connection, path, len(migrations))
            _close_to_readers(path)
            if version < len(migrations):
                # Alone: the change to WAL mode waits for no other process (SQLite, "wal.html", 2.2).
                with locks.exclusive(path.with_name(f"{path.name}.lock")):
                    _set_up(connection)
                    _migrate(connection, path, migrations)
            else:
                _set_up(connection)
        except BaseException:
            connection.close()
            raise
    return connection


def in_memory() -> sqlite3.Connection:
    """An empty ledger that no file has."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for script in MIGRATIONS:
        connection.executescript(script)
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """A transaction: all writes of the block, or none; other writers wait."""
    with database_errors(path):
        # Not the module's own transactions: those begin as readers, and a reader that becomes a writer while another
        # one writes fails at once, whatever the timeout (SQLite, "lang_transaction", 2.2).
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            # A full disk may have ended it already.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _close_to_readers(path: Path) -> None:
    """Make a ledger that accounts which may not write it cannot lock."""
    # SQLite gives the same rights to the files next to it.
    for file in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        with machine_errors(file), contextlib.suppress(FileNotFoundError):
            locks.close_to_readers(file)


def _set_up(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode = WAL")
    # In WAL mode a commit is on the disk only with FULL (SQLite, "pragma_synchronous").
    connection.execute("PRAGMA synchronous = FULL")


def _migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> None:
    with transaction(connection, path):
        # Another process may have done it while this one waited.
        for script in migrations[_version(connection, path, len(migrations)) :]:
            # Not executescript(): it commits first.
            for statement in filter(str.strip, script.split(";")):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(migrations)}")


def _version(connection: sqlite3.Connection, path: Path, known: int) -> int:
    # Before the version: the tables come with it, in one transaction.
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > known:
        raise CheckRefusedError(
            f"the ledger {path} was written by a newer envbuild",
            why=f"Its format is {version}; envbuild {__version__} reads formats up to {known}.",
            fix="Update envbuild, or name another folder for the ledger: ENVBUILD_STATE_DIR, or state_dir in the "
            "configuration file.",
            reason=NEWER,
        )
    if version == 0 and tables:
        raise CheckRefusedError(
            f"{path} is not a ledger",
            why="It is an SQLite database of something else.",
            fix="Move it away, or name another folder: ENVBUILD_STATE_DIR, or state_dir in the configuration file.",
            reason=FOREIGN,
        )
    return version


@contextlib.contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's failures into errors that people understand."""
    try:
        yield
    except EnvbuildError:
        raise
    except sqlite3.Error as error:
        raise _explained(error, path) from error


def _explained(error: sqlite3.Error, path: Path) -> EnvbuildError:
    # Python 3.10 does not tell the number; the texts are those of sqlite3_errstr(), which are fixed.
    text = str(error)
    if "is full" in text or ("disk I/O error" in text and space_is_low(path)):
        return disk_full(path)
    if "malformed" in text or "not a database" in text:
        return CheckRefusedError(
            f"the ledger {path} is damaged",
            why=f"SQLite: {text}.",
            fix="Make it anew from what is published: envbuild ledger rebuild --from REGISTRY/REPO. The damaged file "
            "is kept under another name.",
            reason=DAMAGED,
        )
    if "locked" in text:
        return MachineError(
            f"the ledger {path} is in use",
            why=f"Another process has been writing it for {BUSY_SECONDS} s, or its file system has no locks.",
            fix="Wait for the other process. A network file system without locks is no place for it: set "
            "ENVBUILD_STATE_DIR to a local folder, and share it with --state.",
        )
    if "readonly" in text or "unable to open" in text:
        return MachineError(
            f"no permission to write the ledger {path}",
            why=f"SQLite: {text}.",
            fix="Make the file and its folder writable, or name another folder: ENVBUILD_STATE_DIR.",
        )
    return MachineError(
        f"cannot use the ledger {path}", why=f"SQLite: {text}.", fix="Check the file's disk, mount and permissions."
    )
