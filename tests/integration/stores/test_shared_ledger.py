"""A ledger that runners share, in each kind of place."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.ledger_rows import digest, image_row, lock_row, night_row, publication_row
from helpers.notes import Notes
from helpers.store_entries import Place, check_error

from envbuild.core.errors import CheckRefusedError, EnvbuildError, NetworkError
from envbuild.core.progress import SilentReporter
from envbuild.ledger import remote
from envbuild.ledger.database import MIGRATIONS, connect
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import ImageRow, LockRow, NightRow, PublicationRow
from envbuild.ledger.remote import KIND, SharedState
from envbuild.store.local import LocalStore
from envbuild.store.remote import Remote

pytestmark = pytest.mark.usefixtures("own_account")


class Runner:
    """A machine with a ledger of its own."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.ledger = Ledger.open(folder / "ledger.sqlite")
        self.notes = Notes()
        self.state = SharedState(remote=place.open(), store=LocalStore(folder / "store", self.notes))


def test_a_new_runner_has_what_others_wrote(place: Place, tmp_path: Path) -> None:
    first, second = Runner(place, tmp_path / "one"), Runner(place, tmp_path / "two")
    assert first.state.fetch(first.ledger) == 0
    first.ledger.record(lock_row(), night_row())
    assert first.state.push(first.ledger) == 2
    assert first.state.push(first.ledger) == 0
    second.ledger.record(publication_row())
    assert second.state.fetch(second.ledger) == 2
    # What came from there is not sent back.
    assert second.state.push(second.ledger) == 1
    assert first.state.fetch(first.ledger) == 1
    assert first.ledger.export() == second.ledger.export()


def test_writers_at_once_lose_nothing(place: Place, tmp_path: Path) -> None:
    runners = [Runner(place, tmp_path / str(number)) for number in range(3)]
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            with Ledger.open(tmp_path / str(number) / "ledger.sqlite") as ledger:
                for step in range(3):
                    ledger.record(image_row(f"{number} {step}"))
                    runners[number].state.push(ledger)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    reader = Runner(place, tmp_path / "reader")
    reader.state.fetch(reader.ledger)
    assert len(reader.ledger.rows(ImageRow)) == 9


@pytest.mark.slow
def test_many_entries_are_put_together_and_still_read_once(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MOST_PARTS", 3)
    writer, other = Runner(place, tmp_path / "writer"), Runner(place, tmp_path / "other")
    for number in range(5):
        writer.ledger.record(image_row(number))
        writer.state.push(writer.ledger)
    other.ledger.record(lock_row())
    other.state.push(other.ledger)
    taken = []
    reader = Runner(place, tmp_path / "reader")
    take = SharedState._take
    monkeypatch.setattr(SharedState, "_take", lambda state, key: taken.append(key) or take(state, key))
    reader.state.fetch(reader.ledger)
    assert (len(reader.ledger.rows(ImageRow)), len(reader.ledger.rows(LockRow))) == (5, 1)
    assert len(taken) < 6
    taken.clear()
    reader.state.fetch(reader.ledger)
    assert taken == []


def test_a_place_that_fails_is_an_error_and_the_rows_stay_to_be_sent(served: Place, tmp_path: Path) -> None:
    runner = Runner(served, tmp_path / "one")
    runner.ledger.record(night_row())
    served.proxy.add(status=503)
    with pytest.raises(NetworkError) as caught:
        runner.state.push(runner.ledger)
    check_error(caught.value)
    served.proxy.faults.clear()
    assert runner.state.push(runner.ledger) == 1
    reader = Runner(served, tmp_path / "two")
    reader.state.fetch(reader.ledger)
    assert reader.ledger.rows(NightRow) == (night_row(),)


def test_a_damaged_entry_is_refused(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    place = Place(f"file://{tmp_path}/share")
    runner = Runner(place, tmp_path / "one")
    runner.ledger.record(publication_row())
    runner.state.push(runner.ledger)
    (blob,) = (tmp_path / "share/blobs/sha256").iterdir()
    (entry,) = (tmp_path / "share/entries/ledger").iterdir()
    blob.write_bytes(blob.read_bytes()[:-4])
    reader = Runner(place, tmp_path / "two")
    for spoil in (lambda: None, blob.unlink, lambda: entry.write_bytes(b"{")):
        spoil()
        with pytest.raises(CheckRefusedError) as caught:
            reader.state.fetch(reader.ledger)
        check_error(caught.value)
        assert entry.stem in caught.value.fix
        assert "ledger push" not in caught.value.fix
    assert reader.ledger.rows(PublicationRow) == ()
    # What it says to do does it.
    for file in (tmp_path / "share").rglob(f"*{entry.stem}*"):
        file.unlink()
    assert runner.state.push(runner.ledger) == 1
    assert reader.state.fetch(reader.ledger) == 1


def test_an_entry_that_is_listed_and_not_there_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "share").mkdir()
    place = Place(f"file://{tmp_path}/share")
    writer, reader = Runner(place, tmp_path / "one"), Runner(place, tmp_path / "two")
    writer.ledger.record(publication_row())
    writer.state.push(writer.ledger)
    with monkeypatch.context() as patch:
        # As a registry that copies its manifests between regions.
        patch.setattr(Remote, "find", lambda *_: None)
        assert reader.state.fetch(reader.ledger) == 0
    assert reader.state.fetch(reader.ledger) == 1


def test_an_entry_that_unpacks_to_more_than_a_ledger_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "share").mkdir()
    runner = Runner(Place(f"file://{tmp_path}/share"), tmp_path / "one")
    runner.ledger.record(night_row(host="x" * 100_000))
    runner.state.push(runner.ledger)
    monkeypatch.setattr(remote, "LARGEST_BYTES", 50_000)
    reader = Runner(Place(f"file://{tmp_path}/share"), tmp_path / "two")
    with pytest.raises(CheckRefusedError) as caught:
        reader.state.fetch(reader.ledger)
    assert "larger than 50000 bytes" in caught.value.why
    check_error(caught.value)
    assert reader.ledger.rows(NightRow) == ()


def test_a_directory_is_named_without_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = SharedState.open("state", LocalStore(tmp_path / "store", SilentReporter()))
    assert state.address == f"file://{tmp_path}/state"
    with pytest.raises(EnvbuildError, match="not the address"):
        SharedState.open("ftp://x/y", LocalStore(tmp_path / "store", SilentReporter()))


@pytest.mark.parametrize("address", ["file:///nowhere/state", "oci://127.0.0.1:1/state"])
def test_an_unreachable_place_is_not_called_the_store(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envbuild.store.registry.BACKOFF_SECONDS", 0)
    state = SharedState.open(address, LocalStore(tmp_path / "store", SilentReporter()))
    with pytest.raises(NetworkError, match="the shared state") as caught:
        state.fetch(Ledger.open(tmp_path / "ledger.sqlite"))
    check_error(caught.value)
    assert "ENVBUILD_STORE" not in caught.value.fix


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def put_back(copy: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


@pytest.fixture
def share(tmp_path: Path) -> Path:
    (tmp_path / "share").mkdir()
    return tmp_path / "share"


def all_rows(place: Place, folder: Path) -> dict[str, object]:
    """What a machine that never was there reads."""
    reader = Runner(place, folder)
    reader.state.fetch(reader.ledger)
    return reader.ledger.export()


@pytest.mark.parametrize("to", ["older", "empty"])
@pytest.mark.parametrize("first", ["fetch", "push"])
def test_an_older_copy_that_is_put_back_loses_no_row(share: Path, tmp_path: Path, to: str, first: str) -> None:
    place = Place(f"file://{share}")
    runner, other = Runner(place, tmp_path / "one"), Runner(place, tmp_path / "two")
    empty = copy_of(share, tmp_path / "empty")
    runner.ledger.record(lock_row())
    runner.state.push(runner.ledger)
    older = copy_of(share, tmp_path / "older")
    runner.ledger.record(image_row("after the copy"), night_row())
    runner.state.push(runner.ledger)
    other.ledger.record(publication_row())
    other.state.push(other.ledger)
    runner.state.fetch(runner.ledger)
    put_back(older if to == "older" else empty, share)
    if first == "fetch":
        assert runner.state.fetch(runner.ledger) == 0
    # With what the other machine wrote, which this one had read; and no row that is there.
    assert runner.state.push(runner.ledger) == (3 if to == "older" else 4)
    assert all_rows(place, tmp_path / "new") == runner.ledger.export()
    assert runner.state.push(runner.ledger) == 0
    (note,) = runner.notes.lines
    assert "older copy put back" in note
    # The other machine has nothing that is not there by now.
    other.state.fetch(other.ledger)
    assert other.state.push(other.ledger) == 0
    assert other.ledger.export() == runner.ledger.export()


def test_what_machines_wrote_while_they_were_away_is_merged_after_an_older_copy(share: Path, tmp_path: Path) -> None:
    place = Place(f"file://{share}")
    one, two = Runner(place, tmp_path / "one"), Runner(place, tmp_path / "two")
    copy = copy_of(share, tmp_path / "copy")
    for runner, word in ((one, "one"), (two, "two")):
        runner.ledger.record(image_row(word))
        runner.state.push(runner.ledger)
    # Away: the place has changed when they are back.
    one.ledger.record(image_row("one, away"), night_row(finished_at="2026-01-02T04:00:00Z", exit_code=0))
    two.ledger.record(image_row("two, away"), night_row())
    put_back(copy, share)
    for runner in (two, one, two):
        runner.state.fetch(runner.ledger)
        runner.state.push(runner.ledger)
    one.state.fetch(one.ledger)
    assert one.ledger.export() == two.ledger.export() == all_rows(place, tmp_path / "new")
    assert len(one.ledger.rows(ImageRow)) == 4
    assert one.ledger.rows(NightRow)[0].exit_code == 0


def test_a_state_that_is_newer_than_the_ledger_sends_it_nothing_twice(share: Path, tmp_path: Path) -> None:
    place = Place(f"file://{share}")
    runner = Runner(place, tmp_path / "one")
    runner.ledger.record(lock_row())
    runner.state.push(runner.ledger)
    runner.ledger.close()
    older = copy_of(tmp_path / "one", tmp_path / "older")
    runner = Runner(place, tmp_path / "one")
    runner.ledger.record(image_row(), night_row())
    runner.state.push(runner.ledger)
    entries = len(runner.state.remote.keys("ledger"))
    # The ledger of this machine is the one that an older copy was put back of.
    restored = Runner(place, older)
    restored.ledger.record(publication_row())
    assert restored.state.fetch(restored.ledger) == 2
    assert restored.state.push(restored.ledger) == 1
    assert len(restored.state.remote.keys("ledger")) == entries + 1
    assert all_rows(place, tmp_path / "new") == restored.ledger.export()


def test_rows_of_one_place_go_to_another_that_others_use_already(tmp_path: Path) -> None:
    places = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        places.append(Place(f"file://{tmp_path}/{name}"))
    for place, row in zip(places, (lock_row(), image_row()), strict=True):
        writer = Runner(place, tmp_path / f"writer of {row.table}")
        writer.ledger.record(row)
        writer.state.push(writer.ledger)
    mover = Runner(places[0], tmp_path / "mover")
    mover.state.fetch(mover.ledger)
    mover.state = SharedState(remote=places[1].open(), store=mover.state.store)
    mover.state.fetch(mover.ledger)
    assert mover.state.push(mover.ledger) == 1
    assert all_rows(places[1], tmp_path / "new") == mover.ledger.export()


def test_an_entry_that_was_removed_is_sent_again_from_where_its_rows_are(
    share: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one with all rows, whose parts are there."""
    monkeypatch.setattr(remote, "MOST_PARTS", 3)
    place = Place(f"file://{share}")
    runner = Runner(place, tmp_path / "one")
    for number in range(6):
        runner.ledger.record(image_row(number))
        runner.state.push(runner.ledger)
    for number, entry in enumerate(sorted((share / "entries/ledger").iterdir())):
        entry.unlink()
        runner.ledger.record(image_row(f"and {number}"))
        runner.state.push(runner.ledger)
        assert all_rows(place, tmp_path / f"new {number}") == runner.ledger.export()


WRITER = """
import sys
from pathlib import Path
from helpers.ledger_rows import digest, image_row, night_row
from envbuild.core.progress import SilentReporter
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.remote import SharedState
from envbuild.store.local import LocalStore
place, folder, name = sys.argv[1:]
state = SharedState.open(place, LocalStore(Path(folder) / "store", SilentReporter()))
ledger = Ledger.open(Path(folder) / "ledger.sqlite")
state.fetch(ledger)
for number in range(100000):
    ledger.record(image_row(f"{name} {number}"))
    print(number, flush=True)
    state.push(ledger)
"""


@pytest.mark.parametrize("kills", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_kills_and_older_copies_lose_nothing(share: Path, tmp_path: Path, kills: int) -> None:
    """Writers on two machines are killed anywhere in a push; between them an older copy is put back."""
    place, dice = Place(f"file://{share}"), random.Random(20261127)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    written: set[str] = set()
    for number in range(kills):
        if number % 5 == 1:
            copy = copy_of(share, tmp_path / f"copy {number}")
        if number % 5 == 4:
            put_back(copy, share)
        words = [sys.executable, "-c", WRITER, str(share), str(tmp_path / str(number % 2)), str(number)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ) as writer:
            assert writer.stdout is not None
            written |= {digest(f"{number} {writer.stdout.readline().strip()}") for _ in range(dice.randrange(1, 12))}
            writer.kill()
    for number in (0, 1):
        with Ledger.open(tmp_path / str(number) / "ledger.sqlite") as ledger:
            state = SharedState(remote=place.open(), store=LocalStore(tmp_path / "store", SilentReporter()))
            state.fetch(ledger)
            state.push(ledger)
    reader = Runner(place, tmp_path / "reader")
    reader.state.fetch(reader.ledger)
    assert written <= {row.oci_digest for row in reader.ledger.rows(ImageRow)}


def test_a_ledger_of_before_sends_what_the_state_lacks_and_nothing_else(share: Path, tmp_path: Path) -> None:
    place, row, lost = Place(f"file://{share}"), lock_row(), image_row("lost")
    writer = Runner(place, tmp_path / "writer")
    writer.ledger.record(row)
    writer.state.push(writer.ledger)
    path = tmp_path / "one" / "ledger.sqlite"
    with contextlib.closing(connect(path, MIGRATIONS[:1])) as old:
        for number, item in enumerate((row, lost), 1):
            values = (item.key, item.stack, item.of_target, item.moment, number, item.body())
            old.execute(f"INSERT INTO {item.table} VALUES (?, ?, ?, ?, ?, ?)", values)
        # As it was, it believed that both are there.
        old.execute("INSERT INTO sent VALUES (?, 2)", (place.url,))
        old.executemany(
            "INSERT INTO merged VALUES (?, ?)", [(place.url, key) for key in writer.state.remote.keys(KIND)]
        )
    runner = Runner(place, tmp_path / "one")
    assert runner.state.fetch(runner.ledger) == 0
    assert runner.state.push(runner.ledger) == 1
    assert all_rows(place, tmp_path / "new") == runner.ledger.export()
