"""A ledger that runners share, in each kind of place."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from helpers.ledger_rows import image_row, lock_row, night_row, publication_row
from helpers.store_entries import Place, check_error

from envbuild.core.errors import CheckRefusedError, EnvbuildError, NetworkError
from envbuild.core.progress import SilentReporter
from envbuild.ledger import remote
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import ImageRow, LockRow, NightRow, PublicationRow
from envbuild.ledger.remote import SharedState
from envbuild.store.local import LocalStore
from envbuild.store.remote import Remote

pytestmark = pytest.mark.usefixtures("own_account")


class Runner:
    """A machine with a ledger of its own."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.ledger = Ledger.open(folder / "ledger.sqlite")
        self.state = SharedState(remote=place.open(), store=LocalStore(folder / "store", SilentReporter()))


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
    blob.write_bytes(blob.read_bytes()[:-4])
    reader = Runner(place, tmp_path / "two")
    with pytest.raises(CheckRefusedError):
        reader.state.fetch(reader.ledger)
    assert reader.ledger.rows(PublicationRow) == ()


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
    state = SharedState.at("state", LocalStore(tmp_path / "store", SilentReporter()))
    assert state.address == f"file://{tmp_path}/state"
    with pytest.raises(EnvbuildError, match="not the address"):
        SharedState.at("ftp://x/y", LocalStore(tmp_path / "store", SilentReporter()))


@pytest.mark.parametrize("address", ["file:///nowhere/state", "oci://127.0.0.1:1/state"])
def test_an_unreachable_place_is_not_called_the_store(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envbuild.store.registry.BACKOFF_SECONDS", 0)
    state = SharedState.at(address, LocalStore(tmp_path / "store", SilentReporter()))
    with pytest.raises(NetworkError, match="the shared state") as caught:
        state.fetch(Ledger.open(tmp_path / "ledger.sqlite"))
    check_error(caught.value)
    assert "ENVBUILD_STORE" not in caught.value.fix
