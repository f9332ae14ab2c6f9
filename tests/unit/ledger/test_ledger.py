from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.ledger_rows import digest, image_row, lock_row, night_row, publication_row, step_row

from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.ledger import database
from envbuild.ledger.ledger import Ledger, made_anew, rows_of
from envbuild.ledger.models import (
    ROW_TYPES,
    BisectRow,
    CaseRow,
    CertificateRow,
    ImageRow,
    LockRow,
    NightRow,
    PublicationRow,
    Row,
    StepRow,
    WheelRow,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ledger.sqlite"


def test_rows_come_back_as_they_were_written_oldest_first(path: Path) -> None:
    late, early = lock_row("b", seen_at="2026-02-01T00:00:00Z"), lock_row("a")
    with Ledger.open(path) as ledger:
        assert ledger.record(late, early, image_row()) == 3
    with Ledger.open(path) as ledger:
        assert ledger.rows(LockRow) == (early, late)
        assert ledger.rows(LockRow, newest=1) == (late,)
        assert ledger.rows(ImageRow, stack="mcore", target="cpu") == (image_row(),)
        assert ledger.rows(ImageRow, stack="nemo") == ()
        assert ledger.get(LockRow, early.key) == early


def test_every_table_has_a_type_and_every_type_a_table(path: Path) -> None:
    assert {kind.table for kind in ROW_TYPES} == set(database._TABLES)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        (LockRow.model_construct(digest="d", name="n"), "d/n"),
        (WheelRow.model_construct(digest="d", target="t"), "d/t"),
        (ImageRow.model_construct(oci_digest="d", sqsh_digest="s", target="t"), "d/s/t"),
        (CaseRow.model_construct(run="r", target="t", case="c", repeat=2), "r/t/c/2"),
        (CertificateRow.model_construct(digest="d"), "d"),
        (PublicationRow.model_construct(repository="host/repo", tag="t", oci_digest="d"), "host/repo:t@d"),
        (NightRow.model_construct(id="n"), "n"),
        (StepRow.model_construct(night="n", target="t", base="b", name="image"), "n/t/b/image"),
        (BisectRow.model_construct(good="g", bad="b", target="t"), "g/b/t"),
    ],
)
def test_ledgers_on_disk_and_in_shared_state_are_merged_by_these_keys(row: Row, key: str) -> None:
    assert row.key == key


def test_of_two_rows_of_a_key_the_same_one_stays_in_any_order(path: Path, tmp_path: Path) -> None:
    rows = [
        night_row(),
        night_row(finished_at="2026-01-02T04:00:00Z", exit_code=0),
        publication_row(),
        publication_row(revoked_at="2026-03-01T00:00:00Z", revoked_reason="wrong losses"),
        publication_row(published_at="2026-04-01T00:00:00Z"),
        image_row(),
        image_row(built_at="2025-01-01T00:00:00Z", seconds=3.0),
        step_row(state="waiting"),
        step_row(state="done"),
    ]
    exports = set()
    for seed in range(6):
        random.Random(seed).shuffle(rows)
        with Ledger.open(tmp_path / f"{seed}.sqlite") as ledger:
            for row in rows:
                ledger.record(row)
            exports.add(str(ledger.export()))
            assert ledger.rows(NightRow)[0].exit_code == 0
            assert ledger.rows(PublicationRow)[0].revoked_reason == "wrong losses"
            assert ledger.rows(ImageRow)[0].seconds == 3.0
            assert ledger.rows(StepRow)[0].state == "done"
    assert len(exports) == 1


def test_what_is_exported_can_be_read_again(path: Path, tmp_path: Path) -> None:
    with Ledger.open(path) as ledger, Ledger.open(tmp_path / "other.sqlite") as other:
        ledger.record(lock_row(), night_row(), publication_row())
        other.record(*rows_of(ledger.export(), "the file"))
        assert other.export() == ledger.export()
    with pytest.raises(CheckRefusedError, match="not a ledger"):
        rows_of({"schema": "envbuild.ledger/2"}, "the file")
    with pytest.raises(CheckRefusedError, match="cannot be read"):
        rows_of({"schema": "envbuild.ledger/1", "locks": [{"stack": 1}]}, "the file")


def test_fields_that_older_versions_wrote_are_read_past(path: Path) -> None:
    part = {"version": "1.0", "head": "d" * 40}
    rows = (lock_row(behind=["main"], components={"a": part}), night_row(blocked=[{"component": "a"}]))
    with Ledger.open(path) as ledger:
        ledger.record(*rows)
    text = json.dumps([row.model_dump(mode="json") for row in rows])
    assert not {"behind", "head", "blocked"} & {*re.findall(r"\w+", text)}


def test_a_ledger_of_a_newer_envbuild_is_refused_and_left_as_it_is(path: Path) -> None:
    Ledger.open(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    for use in (Ledger.open, Ledger.read, lambda path: made_anew(path).__enter__()):
        with pytest.raises(CheckRefusedError, match="written by a newer envbuild"):
            use(path)
    assert path.read_bytes() == before


def test_an_older_ledger_is_migrated_and_keeps_its_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger.open(path) as ledger:
        ledger.record(lock_row())
    later = (*database.MIGRATIONS, "CREATE TABLE notes (text TEXT); INSERT INTO notes VALUES ('x');")
    connection = database.connect(path, later)
    assert connection.execute("SELECT text FROM notes").fetchall() == [("x",)]
    assert connection.execute("SELECT count(*) FROM locks").fetchone() == (1,)
    # A second opening runs no script twice.
    assert database.connect(path, later).execute("SELECT count(*) FROM notes").fetchone() == (1,)


def test_a_migration_that_fails_changes_nothing(path: Path) -> None:
    Ledger.open(path).close()
    with pytest.raises(MachineError):
        database.connect(path, (*database.MIGRATIONS, "CREATE TABLE notes (text TEXT); NONSENSE;"))
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(database.MIGRATIONS),)
        assert not connection.execute("SELECT * FROM sqlite_master WHERE name = 'notes'").fetchall()


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to be read as one" * 20, "sqlite"])
def test_what_is_no_ledger_is_refused(path: Path, content: bytes | str) -> None:
    path.parent.mkdir()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE mine (a)")
    before = path.read_bytes()
    with pytest.raises(CheckRefusedError) as caught:
        Ledger.open(path)
    assert caught.value.fix
    assert path.read_bytes() == before


def test_a_damaged_ledger_is_made_anew_and_kept_next_to_it(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"damaged" * 1000)
    with made_anew(path) as ledger:
        ledger.record(publication_row())
    with Ledger.open(path) as ledger:
        assert ledger.rows(PublicationRow) == (publication_row(),)
    (kept,) = path.parent.glob("ledger.sqlite.before-*")
    assert kept.read_bytes() == b"damaged" * 1000
    assert not list(path.parent.glob(".*"))


def test_a_ledger_that_is_whole_keeps_its_rows_when_it_is_made_anew(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.record(night_row())
    with made_anew(path) as ledger:
        ledger.record(publication_row())
    with Ledger.open(path) as ledger:
        assert ledger.rows(NightRow) == (night_row(),)
        assert ledger.rows(PublicationRow) == (publication_row(),)


def test_reading_needs_no_file_and_makes_none(path: Path) -> None:
    with Ledger.read(path) as ledger:
        assert ledger.rows(LockRow) == ()
        assert ledger.export()["locks"] == []
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("umask", "older", "mode"),
    [(0o022, None, 0o600), (0o022, 0o644, 0o600), (0o002, None, 0o660), (0o002, 0o664, 0o660)],
)
def test_accounts_that_may_not_write_a_ledger_cannot_lock_it(
    path: Path, umask: int, older: int | None, mode: int
) -> None:
    before = os.umask(umask)
    try:
        if older is not None:
            Ledger.open(path).close()
            path.chmod(older)
        with Ledger.open(path) as ledger:
            ledger.record(lock_row())
            files = [path, *path.parent.glob("*-wal"), *path.parent.glob("*-shm")]
            assert len(files) == 3
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {mode}
    finally:
        os.umask(before)


def test_several_writers_lose_nothing(path: Path) -> None:
    def write(start: int) -> None:
        with Ledger.open(path) as ledger:
            for number in range(start, start + 25):
                ledger.record(image_row(number), step_row(night=f"n{number}"))

    threads = [threading.Thread(target=write, args=(start,)) for start in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Ledger.open(path) as ledger:
        assert len(ledger.rows(ImageRow)) == len(ledger.rows(StepRow)) == 100


WRITER = """
import sys
from pathlib import Path
from helpers.ledger_rows import image_row, lock_row
from envbuild.ledger.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]))
for number in range(100000):
    ledger.record(image_row(number), lock_row(number))
    print(number, flush=True)
"""


def test_what_was_recorded_survives_kill_9_and_no_row_comes_without_its_pair(path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    written = -1
    for seed in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env=environ)
        assert writer.stdout is not None
        for _ in range(random.Random(seed).randrange(1, 40)):
            written = max(written, int(writer.stdout.readline()))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        with Ledger.open(path) as ledger:
            images, locks = ledger.rows(ImageRow), ledger.rows(LockRow)
            assert {digest(number) for number in range(written + 1)} <= {row.oci_digest for row in images}
            assert {row.oci_digest for row in images} == {row.digest for row in locks}


def test_a_full_disk_is_an_error_and_loses_nothing(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.record(lock_row())
        # As a disk that gives no page more (SQLite, "pragma_max_page_count").
        pages = ledger._connection.execute("PRAGMA page_count").fetchone()[0]
        ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(MachineError, match="is full"):
            ledger.record(*[image_row(number) for number in range(500)])
        assert ledger.rows(LockRow) == (lock_row(),)
        assert ledger.rows(ImageRow) == ()
        ledger._connection.execute("PRAGMA max_page_count = 100000")
        ledger.record(image_row())
        assert ledger.rows(ImageRow) == (image_row(),)
