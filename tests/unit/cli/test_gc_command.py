"""`envbuild gc` at the command line: a dry run removes nothing, and no night goes on meanwhile."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest
from helpers.ledger_rows import night_row
from helpers.placed_images import RECORD

from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.cli.main import run
from envbuild.core.progress import SilentReporter
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.remote import SharedState
from envbuild.nightly import lease
from envbuild.nightly.lease import Lease
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, dump

KEY = f"sha256:{1:064x}"


@pytest.fixture
def store(tmp_path: Path, project: Path) -> LocalStore:
    """A store with an image that nothing needs."""
    store = LocalStore(tmp_path / "cache", SilentReporter())

    def write(folder: Path) -> None:
        (folder / RECORD_FILE).write_bytes(dump(RECORD))

    store.get_or_build("images", KEY, write)
    os.utime(store.path_of("images", KEY), (0, 0))
    return store


def test_a_dry_run_names_what_goes_and_leaves_it(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    for words, there in ((("--dry-run",), True), ((), False)):
        assert run(["gc", "--json", *words]) == 0
        (removed,) = json.loads(capsys.readouterr().out)["removed"]
        assert (removed["kind"], removed["key"]) == ("images", KEY.removeprefix("sha256:"))
        assert store.path_of("images", KEY).is_dir() is there


def test_nothing_goes_while_a_night_runs(store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Ledger.open(tmp_path / "state/ledger.sqlite") as ledger:
        ledger.record(night_row())
    with (tmp_path / "state/nightly-mcore.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run(["gc"]) == 11
    assert "running already" in capsys.readouterr().err
    assert store.path_of("images", KEY).is_dir()


def test_nothing_goes_while_another_runner_has_its_night(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "shared"
    place.mkdir()
    context = Context(store=store, site=load_site(), reporter=SilentReporter())
    state = SharedState.open(str(place), store, None)
    with Ledger.open(tmp_path / "elsewhere.sqlite") as ledger:
        ledger.record(night_row())
        state.push(ledger)
    with Lease(state, "mcore", context).held():
        assert run(["gc", "--state", str(place)]) == 11
        assert "The lease at" in capsys.readouterr().err
        assert store.path_of("images", KEY).is_dir()
        assert run(["gc", "--state", str(place), "--dry-run"]) == 0
    assert run(["gc", "--state", str(place)]) == 0
    assert not store.path_of("images", KEY).exists()
    # It gave the lease back.
    Lease(state, "mcore", context).acquire()


def test_a_lease_that_is_lost_ends_the_command_before_anything_goes(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "shared"
    place.mkdir()
    with Ledger.open(tmp_path / "state/ledger.sqlite") as ledger:
        ledger.record(night_row())

    def looks(_: LocalStore) -> int:
        (place / "cells/lease-mcore.json").unlink()
        threading.Event().wait(300)
        return 0

    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr("envbuild.cli.gc.stored_images", looks)
    assert run(["gc", "--state", str(place)]) == 11
    assert "lost its lease" in capsys.readouterr().err
    assert store.path_of("images", KEY).is_dir()


def test_a_dry_run_says_what_it_looked_at(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    os.utime(store.path_of("images", KEY))
    assert run(["gc", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "images in the store: 1, of which 1 stay" in shown
    assert "0 would be removed" in shown
