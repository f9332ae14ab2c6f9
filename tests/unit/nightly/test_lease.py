"""Who may be the night of a stack where runners share their state."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from helpers.notes import Notes
from helpers.processes import wait_until

from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core import process_identity
from envbuild.core.errors import EnvbuildError, MachineError, NetworkError
from envbuild.core.interruptions import has_come
from envbuild.core.progress import SilentReporter
from envbuild.ledger.remote import SharedState
from envbuild.nightly import lease as module
from envbuild.nightly.lease import LEASE, Lease
from envbuild.store import conditional
from envbuild.store.backend import StoredObject
from envbuild.store.local import LocalStore
from envbuild.store.objects import ObjectCell
from envbuild.store.share import Share

NIGHT = "lease-mcore.json"
GUARD_SECONDS = 300


class Runner:
    """A machine whose clock is wrong by some days."""

    def __init__(self, place: Path, folder: Path, days: float = 0) -> None:
        store = LocalStore(folder, SilentReporter())

        def clock() -> datetime:
            return datetime.now(timezone.utc) + timedelta(days=days)

        context = Context(store=store, site=load_site(), reporter=Notes(), clock=clock)
        self.lease = Lease(SharedState.open(str(place), store, None), "mcore", context)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def runners(tmp_path: Path, place: Path) -> tuple[Runner, Runner]:
    return Runner(place, tmp_path / "one"), Runner(place, tmp_path / "two")


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process is one of another machine, or of another container."""
    monkeypatch.setattr(process_identity, "numbering", lambda: "another")


def age(place: Path, passed: timedelta) -> None:
    """Let some time pass for the store since the lease was written."""
    file = place / "cells" / NIGHT
    moment = file.stat().st_mtime - passed.total_seconds()
    os.utime(file, (moment, moment))


def test_a_lease_from_the_stores_future_ends_as_any_other(
    runners: tuple[Runner, Runner], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runners
    first.lease.acquire()
    elsewhere(monkeypatch)
    age(place, timedelta(days=-400))
    for _ in range(2):
        assert "ends in 30 minutes" in check_refused(second.lease).why
    # Its holder still has it.
    first.lease.renew()
    age(place, LEASE + timedelta(seconds=1))
    second.lease.acquire()


def test_what_a_lease_names_is_shown_in_one_line(runners: tuple[Runner, Runner], place: Path) -> None:
    first, second = runners
    first.lease.acquire()
    record = json.loads((place / "cells" / NIGHT).read_bytes()) | {"numbered_in": "another"}
    for host in ("\n\x1b[2Jhelp: run `x`", "\ud800", "x" * 10**6):
        (place / "cells" / NIGHT).write_text(json.dumps(record | {"host": host}))
        why = check_refused(second.lease).why
        assert why.isprintable()
        assert len(why) < 1000


def check_refused(lease: Lease) -> MachineError:
    with pytest.raises(MachineError, match="running already") as caught:
        lease.acquire()
    return caught.value


def test_two_nights_of_one_machine_exclude_each_other(runners: tuple[Runner, Runner]) -> None:
    first, second = runners
    with first.lease.held():
        check_refused(second.lease)
        first.lease.confirm()
    with second.lease.held():
        check_refused(first.lease)


def at_once(leases: list[Lease]) -> list[Lease]:
    """Those that have the lease, of some that try at the same moment."""
    start, has = threading.Barrier(len(leases)), []

    def run(lease: Lease) -> None:
        start.wait()
        with contextlib.suppress(EnvbuildError):
            lease.acquire()
            has.append(lease)

    threads = [threading.Thread(target=run, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return has


def test_of_runners_at_the_same_moment_one_has_the_lease(tmp_path: Path, place: Path) -> None:
    assert len(at_once([Runner(place, tmp_path / str(number)).lease for number in range(8)])) == 1


def test_a_night_that_was_killed_here_leaves_nothing(
    runners: tuple[Runner, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runners
    child = subprocess.Popen(["sleep", "3600"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child.pid)
        first.lease.acquire()
    check_refused(second.lease)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    # Nobody waited for it, so its number is still in use.
    second.lease.acquire()
    child.wait()


@pytest.mark.parametrize("days", [-400.0, 0.0, 400.0])
def test_a_lease_ends_by_the_stores_time_whatever_clocks_say(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, days: float
) -> None:
    first, second = Runner(place, tmp_path / "one", -days), Runner(place, tmp_path / "two", days)
    first.lease.acquire()
    elsewhere(monkeypatch)
    age(place, LEASE - timedelta(minutes=2))
    error = check_refused(second.lease)
    assert "renewed 28 minutes ago by the clock of the store" in error.why
    assert f"is held by process {os.getpid()} of " in error.why
    # The way out.
    assert f"run this again in 2 minutes, or remove file://{place}/cells/{NIGHT}" in error.fix
    age(place, timedelta(minutes=3))
    second.lease.acquire()


def test_the_way_out_that_the_message_names_works(
    runners: tuple[Runner, Runner], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runners
    first.lease.acquire()
    elsewhere(monkeypatch)
    path = check_refused(second.lease).fix.partition("or remove file://")[2].partition(". ")[0]
    Path(path).unlink()
    second.lease.acquire()
    with pytest.raises(MachineError, match="lost its lease"):
        first.lease.confirm()


def test_a_lease_is_renewed_while_a_step_lasts(
    runners: tuple[Runner, Runner], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runners
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    with first.lease.held():
        elsewhere(monkeypatch)
        for _ in range(3):
            age(place, LEASE * 5)
            before = (place / "cells" / NIGHT).read_bytes()
            wait_until(lambda before=before: (place / "cells" / NIGHT).read_bytes() != before)  # type: ignore[misc]
            check_refused(second.lease)
    second.lease.acquire()


def test_a_runner_that_slept_past_its_lease_has_lost_it(
    runners: tuple[Runner, Runner], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runners
    first.lease.acquire()
    elsewhere(monkeypatch)
    age(place, LEASE * 2)
    second.lease.acquire()
    with pytest.raises(MachineError, match="lost its lease") as lost:
        first.lease.confirm()
    assert (lost.value.exit_code, lost.value.reason) == (11, "lease-lost")
    # Nor does it come back by itself, or take the other's away when it ends.
    with pytest.raises(MachineError, match="lost its lease"):
        first.lease.confirm()
    first.lease._release()
    second.lease.confirm()


def test_a_runner_that_wakes_before_anybody_has_its_lease_renews_it(
    runners: tuple[Runner, Runner], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runners
    first.lease.acquire()
    elsewhere(monkeypatch)
    age(place, LEASE * 2)
    later = module.passed_seconds() + LEASE.total_seconds() * 2
    monkeypatch.setattr(module, "passed_seconds", lambda: later)
    first.lease.confirm()
    check_refused(second.lease)


def test_losing_the_lease_ends_what_the_night_does_at_once(
    runners: tuple[Runner, Runner], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runners
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    published = []

    def night() -> None:
        with first.lease.held():
            (place / "cells" / NIGHT).unlink()
            published.append(threading.Event().wait(GUARD_SECONDS))

    with pytest.raises(MachineError, match="lost its lease") as lost:
        night()
    assert not published
    assert "was removed" in lost.value.why
    assert not has_come()
    second.lease.acquire()


@pytest.mark.parametrize("answer", ["an error", "none"])
def test_without_renewals_a_night_ends_before_its_lease_does(
    runners: tuple[Runner, Runner], place: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    first, _ = runners
    never = threading.Event()

    def fails(*_: object) -> StoredObject | None:
        if answer == "none":
            never.wait()
        raise NetworkError("the store is away", why="No route.")

    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)

    def night() -> None:
        with first.lease.held():
            monkeypatch.setattr(Share, "read", fails)
            # While it holds, a store that is away for a while stops nothing.
            if answer == "an error":
                first.lease.confirm()
            later = module.passed_seconds() + LEASE.total_seconds() - module.MARGIN_SECONDS + 1
            monkeypatch.setattr(module, "passed_seconds", lambda: later)
            threading.Event().wait(GUARD_SECONDS)
            pytest.fail("it went on")

    with pytest.raises(MachineError, match="lost its lease") as lost:
        night()
    assert "could not be renewed" in lost.value.why
    assert ("the store is away" in lost.value.why) is (answer == "an error")
    never.set()


def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on directories are as services that write whatever the condition says."""

    def write(share: Share, path: str, content: bytes, _: object = None) -> bool:
        share.write(path, content)
        return True

    monkeypatch.setattr(Share, "create", write)
    monkeypatch.setattr(Share, "replace", write)
    monkeypatch.setattr(Share, "has_conditions", lambda _: False)


def test_a_store_without_conditional_writes_keeps_two_nights_apart(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    careless(monkeypatch)
    monkeypatch.setattr(conditional, "SETTLE_SECONDS", 0.5)
    assert len(at_once([Runner(place, tmp_path / str(number)).lease for number in range(4)])) <= 1
    monkeypatch.setattr(conditional, "SETTLE_SECONDS", 1e6)
    monkeypatch.setattr(conditional, "sleep", lambda _: None)
    (place / "cells" / NIGHT).unlink()
    first, second = Runner(place, tmp_path / "first").lease, Runner(place, tmp_path / "second").lease
    first.acquire()
    check_refused(second)
    first.renew()
    first._release()
    second.acquire()


def test_what_is_no_lease_keeps_nobody_out(runners: tuple[Runner, Runner], place: Path) -> None:
    first, second = runners
    (place / "cells").mkdir()
    for content in (b"", b"[]", b"{", json.dumps({"pid": 2**70, "host": "x"}).encode()):
        (place / "cells" / NIGHT).write_bytes(content)
        if content.startswith(b'{"'):
            check_refused(first.lease)
            age(place, LEASE * 2)
        first.lease.acquire()
        first.lease._release()
    second.lease.acquire()


def test_an_answer_that_was_lost_is_no_other_runner(
    runners: tuple[Runner, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = runners

    def unheard(method: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *words: method(*words) and False

    with monkeypatch.context() as patch:
        for name in ("create", "replace"):
            patch.setattr(Share, name, unheard(getattr(Share, name)))
        first.lease.acquire()
        first.lease.renew()
    check_refused(second.lease)


def test_a_write_that_came_too_late_is_made_again(
    runners: tuple[Runner, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to a registry, which has no conditions: nothing is known after a slow one but what is there."""
    first, second = runners
    first.lease.acquire()
    replace, slow = ObjectCell.replace, [True, True]

    def replaced(cell: ObjectCell, content: bytes, of: StoredObject) -> bool:
        return replace(cell, content, of) and not (slow and slow.pop())

    monkeypatch.setattr(ObjectCell, "replace", replaced)
    first.lease.renew()
    slow += [True] * 3
    with pytest.raises(EnvbuildError, match="could not be written"):
        first.lease.renew()
    first.lease.renew()
    check_refused(second.lease)
