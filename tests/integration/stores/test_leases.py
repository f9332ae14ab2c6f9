"""Leases in each kind of place that runners share."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from helpers.processes import wait_until
from helpers.store_entries import Place, check_error

from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core import process_identity
from envbuild.core.errors import MachineError, NetworkError
from envbuild.core.progress import SilentReporter
from envbuild.ledger.remote import SharedState
from envbuild.nightly import lease as module
from envbuild.nightly.lease import Lease
from envbuild.store import conditional, repository
from envbuild.store.local import LocalStore

pytestmark = pytest.mark.usefixtures("own_account")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place without conditions settles at once, and no write to it is too slow."""
    monkeypatch.setattr(conditional, "SETTLE_SECONDS", 1e6)
    monkeypatch.setattr(conditional, "sleep", lambda _: None)


def lease_at(place: Place, folder: Path) -> Lease:
    store = LocalStore(folder, SilentReporter())
    context = Context(store=store, site=load_site(), reporter=SilentReporter())
    return Lease(SharedState(remote=place.open(), store=store), "nemo-2.7", context)


def check_refused(lease: Lease) -> MachineError:
    with pytest.raises(MachineError, match="running already") as caught:
        lease.acquire()
    check_error(caught.value)
    return caught.value


def test_one_of_two_has_it_until_it_ends_by_the_stores_time(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = lease_at(place, tmp_path / "one"), lease_at(place, tmp_path / "two")
    with first.held():
        check_refused(second)
        first.confirm()
    second.acquire()
    monkeypatch.setattr(process_identity, "numbering", lambda: "another machine's")
    error = check_refused(first)
    assert "30 minutes" in error.fix
    assert place.url.partition("://")[2] in error.fix
    # The last renewal was more than a second ago, and all clocks here are the store's.
    cell = second._cell
    written = cell.read()
    assert written is not None
    assert abs(cell.now() - written.modified) < timedelta(minutes=5)
    monkeypatch.setattr(module, "LEASE", written.modified - cell.now() - timedelta(seconds=1))
    first.acquire()
    with pytest.raises(MachineError, match="lost its lease"):
        second.confirm()


def test_answers_that_are_lost_give_nobody_a_second_lease(served: Place, tmp_path: Path) -> None:
    first, second = lease_at(served, tmp_path / "one"), lease_at(served, tmp_path / "two")
    for _ in range(2):
        served.proxy.add(method="PUT", path="lease-nemo-2.7", times=1, drop_answer=True)
        first.acquire()
        check_refused(second)


def test_a_place_that_is_away_keeps_the_lease(served: Place, tmp_path: Path) -> None:
    first, second = lease_at(served, tmp_path / "one"), lease_at(served, tmp_path / "two")
    first.acquire()
    fault = served.proxy.add(path="lease-nemo-2.7", status=503)
    with pytest.raises(NetworkError):
        first.renew()
    first.confirm()
    fault.times = 0
    first.confirm()
    check_refused(second)


@pytest.mark.parametrize("kept", [(), ("if-none-match",)])
def test_a_bucket_without_conditional_writes_keeps_two_nights_apart(
    s3: Place, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    lost = {"if-match", "if-none-match"} - set(kept)
    s3.proxy.translate = lambda headers: {n: v for n, v in headers.items() if n.lower() not in lost}
    first, second = lease_at(s3, tmp_path / "one"), lease_at(s3, tmp_path / "two")
    with first.held():
        assert not first._cell._has_conditions  # type: ignore[attr-defined]
        check_refused(second)
        first.renew()
    second.acquire()
    check_refused(first)


def test_a_write_that_a_registry_took_too_long_for_does_not_count(
    oci: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another runner may have looked before it."""
    lease = lease_at(oci, tmp_path / "one")
    lease.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(conditional, "SETTLE_SECONDS", -1.0)
        with pytest.raises(NetworkError, match="could not be written"):
            lease.renew()
    lease.renew()


def test_of_two_that_look_at_a_tag_at_the_same_moment_the_later_one_has_it(
    oci: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = lease_at(oci, tmp_path / "one")._cell, lease_at(oci, tmp_path / "two")._cell
    done: list[bool] = []

    def meanwhile(_: float) -> None:
        monkeypatch.setattr(conditional, "sleep", lambda _: None)
        # It has looked before: for it there is nothing yet.
        monkeypatch.setattr(repository.TagCell, "_manifest", looked)
        done.append(second.create(b"second"))

    manifest, looks = repository.TagCell._manifest, [None]

    def looked(cell: repository.TagCell) -> bytes | None:
        return looks.pop() if looks else manifest(cell)

    monkeypatch.setattr(conditional, "sleep", meanwhile)
    assert not first.create(b"first")
    assert done == [True]


def test_a_registry_that_tells_no_time_is_refused(oci: Place, tmp_path: Path) -> None:
    oci.proxy.translate_back = lambda headers: {n: v for n, v in headers.items() if n.lower() != "date"}
    with pytest.raises(NetworkError, match="tells no time") as caught:
        lease_at(oci, tmp_path / "one").acquire()
    check_error(caught.value)


RUNNER = """
import sys, time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from envbuild.catalog.context import Context
from envbuild.catalog.site import load_site
from envbuild.core import process_identity
from envbuild.core.errors import EnvbuildError
from envbuild.core.progress import SilentReporter
from envbuild.ledger.remote import SharedState
from envbuild.nightly import lease
from envbuild.store.local import LocalStore
place, log, name = sys.argv[1:]
# A machine of its own with a clock of its own. Leases of two seconds.
process_identity.numbering = lambda: name
lease.LEASE = timedelta(seconds=2)
lease.MARGIN_SECONDS, lease.RENEW_SECONDS, lease.RETRY_SECONDS = 0.5, 0.2, 0.05
store = LocalStore(Path(log).with_name(name), SilentReporter())
away = timedelta(days=hash(name) % 1000)
context = Context(
    store=store, site=load_site(), reporter=SilentReporter(), clock=lambda: datetime.now(timezone.utc) + away
)
while True:
    own = lease.Lease(SharedState.open(place, store), "mcore", context)
    try:
        with own.held(), open(log, "a") as out:
            own.confirm()
            print("begins", name, file=out, flush=True)
            while True:
                own.confirm()
                print("publishes", name, file=out, flush=True)
                time.sleep(0.02)
    except EnvbuildError:
        time.sleep(0.05)
"""


class Runners:
    """Processes that want the same lease, and what they did in its order."""

    def __init__(self, place: Place, folder: Path) -> None:
        self._words = [sys.executable, "-c", RUNNER, place.url, str(folder / "log")]
        endpoint = {"AWS_ENDPOINT_URL": place.endpoint} if place.endpoint else {}
        self._environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **endpoint}
        self._log = folder / "log"
        self._log.touch()
        self.alive: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        self.alive[name] = subprocess.Popen([*self._words, name], env=self._environ)

    def kill(self, name: str) -> None:
        process = self.alive.pop(name)
        process.kill()
        process.wait()

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self._log.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["file", "s3"])
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_two_nights_never_run_whoever_is_killed(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, kills: int
) -> None:
    (tmp_path / "share").mkdir()
    place = request.getfixturevalue("s3") if kind == "s3" else Place(f"file://{tmp_path}/share")
    dice, runners = random.Random(20261127), Runners(place, tmp_path)
    try:
        for number in range(3):
            runners.start(f"runner{number}")
        for number in range(3, 3 + kills):
            wanted = len(runners.lines()) + dice.randrange(2, 10)
            wait_until(lambda wanted=wanted: len(runners.lines()) >= wanted)  # type: ignore[misc]
            holder = runners.lines()[-1][1]
            runners.kill(holder if holder in runners.alive and dice.random() < 0.7 else dice.choice([*runners.alive]))
            runners.start(f"runner{number}")
    finally:
        for name in [*runners.alive]:
            runners.kill(name)
    holders = [name for word, name in runners.lines() if word == "begins"]
    assert len(holders) > 1
    holder = ""
    for word, name in runners.lines():
        holder = name if word == "begins" else holder
        assert name == holder
