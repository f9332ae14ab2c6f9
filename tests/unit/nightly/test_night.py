"""The chain of a night: which steps run, what a failure stops, and what the next night does again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.certify_world import World
from unit.certify.conftest import make_world

from envbuild.catalog.catalog import Selection
from envbuild.core.errors import (
    BuildError,
    CertificationFailedError,
    ConfigurationError,
    EnvbuildError,
    FailedRun,
    InterruptedByUserError,
    MachineError,
    NetworkError,
)
from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import CaseRow, LockRow, NightRow, StepName, StepRow
from envbuild.lock.lock import LockResult
from envbuild.nightly import nightly
from envbuild.nightly.models import Job, NamedStep, NightRequest, Outcome
from envbuild.nightly.nightly import Night

FAILURE = CertificationFailedError("1 of 2 cases failed", why="parity-loss: another loss")


class Chain:
    """A night of two targets whose steps do what a test says; the lock is the world's."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.ledger = Ledger.open(world.project / "ledger.sqlite")
        self.calls: list[tuple[str, str, int]] = []
        self.failures: dict[tuple[str, str], list[BaseException]] = {}
        self.outcomes: dict[tuple[str, str], dict[str, object]] = {}
        self.locks: list[EnvbuildError] = []
        self.built = False
        self.confirm: Callable[[], None] = lambda: None
        monkeypatch.setattr(nightly, "make_lock", self._lock)

    def _lock(self, selection: Selection, *_: object) -> LockResult:
        if self.locks:
            raise self.locks.pop()
        return LockResult(self.world.lock, built=self.built)

    def _step(self, name: StepName) -> NamedStep:
        def run(job: Job, attempt: int) -> Outcome:
            self.calls.append((job.target, name, attempt))
            if failures := self.failures.get((job.target, name)):
                raise failures.pop(0)
            return Outcome(**{"job": job, "state": "done", **self.outcomes.get((job.target, name), {})})  # type: ignore[arg-type]

        return NamedStep(name=name, run=run, inputs=lambda job: f"{name} {job.target} {job.lock.lock.digest}")

    def run(self, **changes: object) -> NightRow:
        selection = self.world.selection
        other = Selection(selection.catalog, "mcore", "debian12", "h200")
        request = NightRequest(**{"selections": (selection, other), "project": self.world.project, **changes})  # type: ignore[arg-type]
        steps = [self._step(name) for name in ("image", "certify", "publish")]
        self.night = Night(request, steps, self.ledger, self.world.context, self.confirm)
        self.calls.clear()
        return self.night.run()

    def states(self) -> list[tuple[str, str, str]]:
        return [(row.target, row.name, row.state) for row in self.night.rows]


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    return Chain(make_world(tmp_path / "project", monkeypatch), monkeypatch)


def test_every_target_has_every_step_and_the_ledger_has_them(chain: Chain) -> None:
    night = chain.run()
    assert chain.calls == [(target, name, 1) for target in ("cpu", "h200") for name in ("image", "certify", "publish")]
    assert night.exit_code == 0
    (row,) = chain.ledger.rows(NightRow)
    assert row == night
    assert row.finished_at
    # As they ran, also within a second.
    assert [(step.target, step.name) for step in chain.ledger.rows(StepRow)] == [
        ("", "lock"),
        *((target, name) for target in ("cpu", "h200") for name in ("image", "certify", "publish")),
    ]
    assert chain.ledger.rows(LockRow)[0].digest == chain.world.lock.lock.digest == row.lock_digest


def test_a_red_target_stops_no_green_one_and_is_tried_twice(chain: Chain) -> None:
    chain.failures["cpu", "certify"] = [FAILURE, FAILURE]
    night = chain.run()
    assert chain.calls[:3] == [("cpu", "image", 1), ("cpu", "certify", 1), ("cpu", "certify", 2)]
    assert ("cpu", "publish", 1) not in chain.calls
    assert ("h200", "publish", 1) in chain.calls
    assert ("cpu", "certify", "failed") in chain.states()
    assert ("cpu", "publish", "skipped") in chain.states()
    assert night.exit_code == CertificationFailedError.exit_code


def test_a_failure_that_does_not_come_again_does_not_count(chain: Chain) -> None:
    chain.failures["cpu", "certify"] = [FAILURE]
    assert chain.run().exit_code == 0
    assert [row.attempts for row in chain.night.rows if row.target == "cpu"] == [1, 2, 1]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (FAILURE, False),
        (BuildError("no"), False),
        (NetworkError("the index is down"), True),
        (RuntimeError("a fault of envbuild"), True),
    ],
)
def test_what_counted_is_tried_again_only_when_something_changed(chain: Chain, error: Exception, again: bool) -> None:
    chain.failures["cpu", "certify"] = [error, error]
    assert chain.run().exit_code
    second = chain.run()
    assert (("cpu", "certify", 1) in chain.calls) is again
    # What is not tried again has failed still.
    assert (second.exit_code == 0) is again
    if not again:
        failed = next(row for row in chain.night.rows if row.state == "failed")
        assert failed.attempts == 0
        assert failed.error is not None
        assert failed.error.kind == type(error).__name__
        third = chain.run()
        assert third.exit_code == second.exit_code
        assert chain.run(retry=True).exit_code == 0


def test_a_wrong_command_line_is_not_tried_twice(chain: Chain) -> None:
    chain.failures["cpu", "image"] = [ConfigurationError("no such base")] * 2
    chain.run()
    assert ("cpu", "image", 2) not in chain.calls


def test_what_waits_for_hardware_stops_its_target_with_its_exit_code(chain: Chain) -> None:
    chain.outcomes["h200", "certify"] = {"state": "waiting", "plan": "out/plans/x"}
    assert chain.run().exit_code == 8
    assert chain.states()[-2:] == [("h200", "certify", "waiting"), ("h200", "publish", "skipped")]
    # A failure comes before waiting.
    chain.failures["cpu", "image"] = [BuildError("no")] * 2
    assert chain.run().exit_code == 6


def test_a_lease_that_is_lost_ends_the_night_before_it_publishes(chain: Chain) -> None:
    def confirm() -> None:
        if len(chain.calls) == 2:
            raise MachineError("the lease is lost")

    chain.confirm = confirm
    with pytest.raises(MachineError, match="the lease is lost"):
        chain.run()
    assert [name for _, name, _ in chain.calls] == ["image", "certify"]
    assert chain.ledger.rows(NightRow)[0].finished_at is None


def test_an_interruption_ends_the_night_and_leaves_it_unfinished(chain: Chain) -> None:
    chain.failures["cpu", "certify"] = [InterruptedByUserError()]
    with pytest.raises(InterruptedByUserError):
        chain.run()
    (night,) = chain.ledger.rows(NightRow)
    assert night.finished_at is None
    assert chain.run().exit_code == 0


def test_without_a_new_lock_the_one_that_is_there_goes_on(chain: Chain) -> None:
    chain.locks = [NetworkError("the index is down")] * 2
    night = chain.run()
    assert night.exit_code == NetworkError.exit_code
    assert ("cpu", "publish", 1) in chain.calls
    (lock,) = [row for row in chain.night.rows if row.name == "lock"]
    assert lock.error is not None
    assert (lock.state, lock.error.fault, lock.attempts) == ("failed", "infrastructure", 2)


def test_the_last_good_lock_may_be_on_another_base(chain: Chain) -> None:
    chain.locks = [NetworkError("the index is down")] * 2
    chain.run(selections=(Selection(chain.world.selection.catalog, "mcore", "ubuntu2404", "cpu"),))
    assert ("cpu", "publish", 1) in chain.calls


def test_cases_that_failed_are_in_the_ledger_with_their_curves(chain: Chain, world_cases: list[dict]) -> None:
    failure = CertificationFailedError("1 of 2 cases failed", run=FailedRun(cases=world_cases))
    chain.failures["cpu", "certify"] = [failure, failure]
    night = chain.run()
    rows = chain.ledger.rows(CaseRow)
    assert {row.run for row in rows} == {night.id}
    assert all(row.loss for row in rows)


@pytest.fixture
def world_cases(world: World) -> list[dict]:
    done = world.certify()
    return [case.model_dump(mode="json", by_alias=True) for case in done.statement.predicate.cases]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path / "other", monkeypatch)


def test_a_lease_is_renewed_before_each_step(chain: Chain) -> None:
    renewed: list[int] = []
    chain.run()
    chain.night.renew = lambda: renewed.append(1)
    chain.night.run()
    assert len(renewed) == 6
