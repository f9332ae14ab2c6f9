"""Who may be the night of a stack where runners share their state."""

from __future__ import annotations

import os
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from helpers.notes import Notes
from helpers.processes import wait_until

from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core.errors import MachineError
from envbuild.core.progress import SilentReporter
from envbuild.ledger.remote import SharedState
from envbuild.nightly import lease as module
from envbuild.nightly.lease import LEASE, Lease
from envbuild.store.local import LocalStore

NOW = datetime(2026, 11, 23, 3, 0, tzinfo=timezone.utc)


class Runner:
    def __init__(self, place: Path, folder: Path) -> None:
        self.now = NOW
        store = LocalStore(folder, SilentReporter())
        context = Context(store=store, site=load_site(), reporter=Notes(), clock=lambda: self.now)
        self.lease = Lease(SharedState.at(str(place), store, None), "mcore", context)


@pytest.fixture
def runners(tmp_path: Path) -> tuple[Runner, Runner]:
    (tmp_path / "state").mkdir()
    return Runner(tmp_path / "state", tmp_path / "one"), Runner(tmp_path / "state", tmp_path / "two")


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process is one of another machine, or of another container."""
    monkeypatch.setattr(module, "_numbered_in", lambda: "another")


def test_two_nights_of_one_machine_exclude_each_other(runners: tuple[Runner, Runner]) -> None:
    first, second = runners
    with first.lease.held():
        with pytest.raises(MachineError, match="running already"):
            second.lease.take()
        first.lease.take()
    with second.lease.held(), pytest.raises(MachineError, match="running already"):
        first.lease.take()


def test_a_night_that_was_killed_here_leaves_nothing(
    runners: tuple[Runner, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runners
    child = subprocess.Popen(["sleep", "3600"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child.pid)
        first.lease.take()
    with pytest.raises(MachineError, match="running already"):
        second.lease.take()
    child.kill()
    child.wait()
    second.lease.take()


def test_a_night_that_was_killed_elsewhere_keeps_others_out_for_minutes(
    runners: tuple[Runner, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runners
    first.lease.take()
    elsewhere(monkeypatch)
    with pytest.raises(MachineError, match="running already") as caught:
        second.lease.take()
    assert "2026-11-23T03:30:00Z" in caught.value.why
    second.now = NOW + LEASE + timedelta(seconds=1)
    second.lease.take()


def test_a_lease_is_renewed_while_a_step_lasts(runners: tuple[Runner, Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = runners
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    with first.lease.held():
        elsewhere(monkeypatch)
        second.now = first.now = NOW + LEASE * 5
        wait_until(lambda: refused(second.lease))
        assert refused(second.lease)
    second.lease.take()


def refused(lease: Any) -> bool:
    try:
        lease._refuse_if_held(lease._newest())
    except MachineError:
        return True
    return False
