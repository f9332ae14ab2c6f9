"""Which rank failed first, from what was seen and what was written."""

from __future__ import annotations

from envbuild_smoke.failure import RankEnd, earliest


def end(rank: int, exit_status: int, seen_at: float, *, killed: bool = False) -> RankEnd:
    return RankEnd(rank=rank, exit_status=exit_status, seen_at=seen_at, killed_by_runner=killed)


def record(at: float, message: str = "ValueError: x") -> dict[str, object]:
    return {"monotonic_seconds": at, "message": message}


def test_no_failure_when_all_end_well() -> None:
    assert earliest([end(0, 0, 1.0), end(1, 0, 2.0)], {}, "c") is None


def test_record_decides_not_the_order_of_exits() -> None:
    found = earliest([end(0, 1, 1.0), end(1, 1, 3.0)], {0: record(0.9), 1: record(0.5, "cause")}, "c")
    assert found is not None
    assert (found.rank, found.message, found.log) == (1, "cause", "cases/c/rank1.log")


def test_death_is_seen_later_than_it_happened() -> None:
    found = earliest([end(0, 1, 1.0), end(1, -11, 1.2)], {0: record(0.9)}, "c")
    assert found is not None
    assert (found.rank, found.kind, found.message) == (1, "signal", "killed by SIGSEGV")


def test_death_long_after_an_exception_is_no_cause() -> None:
    found = earliest([end(0, 1, 1.0), end(1, -6, 9.0)], {0: record(0.9)}, "c")
    assert found is not None
    assert found.rank == 0


def test_ranks_the_runner_killed_are_no_cause() -> None:
    found = earliest([end(0, -9, 1.0, killed=True), end(1, 1, 2.0)], {}, "c")
    assert found is not None
    assert found.rank == 1
    assert earliest([end(0, -9, 1.0, killed=True)], {}, "c") is None


def test_rank_that_raised_before_it_was_killed_is_the_cause() -> None:
    found = earliest([end(0, -9, 5.0, killed=True), end(1, 1, 4.0)], {0: record(1.0, "cause"), 1: record(2.0)}, "c")
    assert found is not None
    assert (found.rank, found.kind, found.message) == (0, "exception", "cause")


def test_signal_without_a_name_is_given_by_number() -> None:
    found = earliest([end(0, -63, 1.0)], {}, "c")
    assert found is not None
    assert found.message == "killed by signal 63"
