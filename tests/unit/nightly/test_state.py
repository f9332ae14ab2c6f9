from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest
from helpers.ledger_rows import digest, night_row, publication_row, step_row
from pydantic import ValidationError

from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import BisectRow, Fault, Row, StepError
from envbuild.nightly.state import TargetState, states

NOW = datetime(2026, 1, 20, tzinfo=timezone.utc)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path / "ledger.sqlite")


def only(ledger: Ledger, *rows: Row, limit: float | None = 30) -> TargetState:
    ledger.record(*rows)
    (state,) = states(ledger, NOW, limit)
    return state


def failure(fault: Fault) -> StepError:
    return StepError(fault=fault, kind="CertificationFailedError", exit_code=7, what="3 of 15 cases failed")


def published(day: str, **fields: object) -> Row:
    at = f"2026-01-{day}T00:00:00Z"
    return publication_row(day, certified_at=at, measured_at=at, published_at=at, **fields)


def test_the_newest_certified_image_is_the_good_one(ledger: Ledger) -> None:
    state = only(ledger, published("10"), published("15"), published("12"))
    assert (state.state, state.age_days, state.since) == ("good", 5.0, "2026-01-15T00:00:00Z")
    assert state.image is not None
    assert state.image.oci_digest == digest("15")
    assert state.pull_command == "envbuild pull registry.example/team/envs:mcore-cpu --target cpu --format sqsh"
    assert "good" in state.line()


def test_the_pull_command_is_quoted(ledger: Ledger) -> None:
    """Names are read from ledgers that other machines write."""
    state = only(ledger, published("10", target="cpu;id", repository="/shared/a;touch b"))
    assert state.pull_command == "envbuild pull '/shared/a;touch b:mcore-cpu' --target 'cpu;id' --format sqsh"


@pytest.mark.parametrize(
    "fields",
    [
        {"repository": "x;touch /tmp/p;#"},
        {"repository": "registry.example/Team"},
        {"repository": "registry.example/team$(id)"},
        {"tag": "a;b"},
        {"moving_tag": "$(id)"},
    ],
)
def test_a_row_of_no_repository_or_tag_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        published("10", **fields)


def test_what_was_revoked_or_is_not_certified_is_not_it(ledger: Ledger) -> None:
    none = {"certificate_digest": None, "keyid": None, "certified_at": None, "measured_at": None}
    state = only(
        ledger,
        published("10"),
        published("15", revoked_at="2026-01-16T00:00:00Z", revoked_reason="wrong"),
        publication_row("u", published_at="2026-01-17T00:00:00Z", **none),
    )
    assert state.image is not None
    assert state.image.oci_digest == digest("10")


def test_an_image_older_than_the_policy_allows_is_stale_since_the_limit(ledger: Ledger) -> None:
    state = only(ledger, published("10"), limit=7)
    assert (state.state, state.since) == ("stale", "2026-01-17T00:00:00Z")
    assert "STALE" in state.line()
    assert states(ledger, NOW, None)[0].state == "good"


def test_a_lock_that_failed_makes_the_state_suspect_since_the_first_night_of_it(ledger: Ledger) -> None:
    nights = [
        step_row("certify", night=f"n{day}", started_at=f"2026-01-{day}T01:00:00Z", state=state, error=error)
        for day, state, error in (
            ("11", "failed", failure("training")),
            ("12", "done", None),
            ("13", "failed", failure("training")),
            ("14", "failed", failure("training")),
        )
    ]
    target = only(ledger, published("10"), *nights)
    assert (target.state, target.since) == ("suspect", "2026-01-13T01:00:00Z")
    assert "certify failed: 3 of 15 cases failed" in target.line()


def test_a_fault_of_the_infrastructure_makes_no_image_suspect(ledger: Ledger) -> None:
    step = step_row("image", started_at="2026-01-14T00:00:00Z", state="failed", error=failure("infrastructure"))
    state = only(ledger, published("10"), step)
    assert state.state == "good"
    assert state.step == step


def test_waiting_and_none(ledger: Ledger) -> None:
    waiting = step_row("certify", night="n2", started_at="2026-01-14T00:00:00Z", state="waiting", plan="out/plans/x")
    state = only(ledger, night_row("n2", started_at="2026-01-14T00:00:00Z"), waiting)
    assert (state.state, state.image) == ("waiting", None)
    assert only(ledger, published("10")).state == "waiting"


def test_a_target_of_a_night_without_any_image_is_shown(ledger: Ledger) -> None:
    state = only(ledger, night_row(targets=["h200"]))
    assert (state.target, state.state, state.pull_command) == ("h200", "none", "")


def test_a_clock_that_is_ahead_gives_no_negative_age(ledger: Ledger) -> None:
    at = "2026-01-21T00:00:00Z"
    assert only(ledger, publication_row(certified_at=at)).age_days == 0.0


def test_what_a_bisection_found_is_named_as_long_as_its_lock_fails(ledger: Ledger) -> None:
    bad, text = digest("bad"), "broken by liba 1.0 -> 2.0\nfailure: 3 of 15 cases failed"
    row = BisectRow(
        stack="mcore", night="n1", target="cpu", good=digest("good"), bad=bad, component="liba", before="1.0",
        after="2.0", commit="", tests=4, text=text, ended_at="2026-01-16T00:00:00Z",
    )  # fmt: skip
    first = step_row("certify", night="n1", state="failed", lock_digest=bad, error=failure("training"))
    second = step_row("certify", night="n2", state="failed", lock_digest=bad, error=failure("training"))
    state = only(ledger, published("10"), night_row("n1"), first, row, night_row("n2"), second)
    assert (state.state, state.broken_by) == ("suspect", "broken by liba 1.0 -> 2.0")
    assert state.line().endswith("broken by liba 1.0 -> 2.0")
    assert state.as_json()["broken_by"] == state.broken_by
    other = step_row("certify", night="n3", state="failed", lock_digest=digest("c"), error=failure("training"))
    assert only(ledger, night_row("n3"), other).broken_by == ""


def test_a_stack_without_a_new_lock_says_since_when_and_why(ledger: Ledger) -> None:
    def locked(night: str, day: str, **fields: object) -> tuple[Row, Row]:
        at = f"2026-01-{day}T00:00:00Z"
        return night_row(night, started_at=at), step_row("lock", night=night, target="", started_at=at, **fields)

    error = StepError(fault="check", kind="ResolutionError", exit_code=4, what="cannot resolve")
    failed = {"state": "failed", "error": error}
    nights = [*locked("n1", "10"), *locked("n2", "11", **failed), *locked("n3", "12", **failed)]
    target = only(ledger, published("10"), *nights)
    assert target.as_json()["failed_lock"] == {"what": "cannot resolve", "since": "2026-01-11T00:00:00Z"}
    assert target.state == "good"
    assert only(ledger, *locked("n4", "13")).failed_lock is None
