"""Which rank failed first, from what was seen and what was written."""

from __future__ import annotations

import pytest

from envbuild_smoke.error_line import error_line
from envbuild_smoke.run.failure import RankEnd, earliest


def end(rank: int, exit_status: int, seen_at: float, *, killed: bool = False, done: bool = False) -> RankEnd:
    return RankEnd(rank=rank, exit_status=exit_status, seen_at=seen_at, killed_by_runner=killed, done=done)


def record(at: float, message: str = "ValueError: x") -> dict[str, object]:
    return {"monotonic_seconds": at, "kind": "exception", "message": message}


def log_name(rank: int) -> str:
    return f"cases/c/rank{rank}.log"


def test_no_failure_when_all_end_well() -> None:
    assert earliest([end(0, 0, 1.0, done=True), end(1, -9, 2.0, done=True)], {}, log_name) is None


def test_end_before_the_task_is_done_is_a_failure_whatever_the_status() -> None:
    found = earliest([end(0, 0, 1.0, done=True), end(1, 0, 2.0)], {}, log_name)
    assert found is not None
    assert (found.rank, found.kind, found.exit_status) == (1, "exit", 0)
    assert found.message == "exited with status 0 without an exception, before it was done"


def test_kind_of_the_record_is_the_failure_s() -> None:
    not_finite = {**record(1.0, "FloatingPointError: step 2: loss is nan"), "kind": "not-finite"}
    found = earliest([end(0, 1, 2.0)], {0: not_finite}, log_name)
    assert found is not None
    assert found.kind == "not-finite"


def test_record_decides_not_the_order_of_exits() -> None:
    found = earliest([end(0, 1, 1.0), end(1, 1, 3.0)], {0: record(0.9), 1: record(0.5, "cause")}, log_name)
    assert found is not None
    assert (found.rank, found.message, found.log) == (1, "cause", "cases/c/rank1.log")


def test_death_is_seen_later_than_it_happened() -> None:
    found = earliest([end(0, 1, 1.0), end(1, -11, 1.2)], {0: record(0.9)}, log_name)
    assert found is not None
    assert (found.rank, found.kind, found.message) == (1, "signal", "killed by SIGSEGV")


def test_death_long_after_an_exception_is_no_cause() -> None:
    found = earliest([end(0, 1, 1.0), end(1, -6, 9.0)], {0: record(0.9)}, log_name)
    assert found is not None
    assert found.rank == 0


def test_ranks_the_runner_killed_are_no_cause() -> None:
    found = earliest([end(0, -9, 1.0, killed=True), end(1, 1, 2.0)], {}, log_name)
    assert found is not None
    assert found.rank == 1
    assert earliest([end(0, -9, 1.0, killed=True)], {}, log_name) is None


def test_rank_that_raised_before_it_was_killed_is_the_cause() -> None:
    found = earliest(
        [end(0, -9, 5.0, killed=True), end(1, 1, 4.0)], {0: record(1.0, "cause"), 1: record(2.0)}, log_name
    )
    assert found is not None
    assert (found.rank, found.kind, found.message) == (0, "exception", "cause")


def test_signal_without_a_name_is_given_by_number() -> None:
    found = earliest([end(0, -63, 1.0)], {}, log_name)
    assert found is not None
    assert found.message == "killed by signal 63"


def syntax_error() -> SyntaxError:
    try:
        compile("a b", "file.py", "exec")
    except SyntaxError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one line"), "ValueError: one line"),
        # As torch's compiler ends: the cause, then what to set for more of it.
        (
            RuntimeError(
                "OSError: [Errno 30] Read-only file system: '/home/user/.triton'\n\nSet TORCHDYNAMO_VERBOSE=1"
            ),
            "RuntimeError: OSError: [Errno 30] Read-only file system: '/home/user/.triton'",
        ),
        (RuntimeError("\n  the cause\nhints"), "RuntimeError: the cause"),
        (RuntimeError(), "RuntimeError"),
        (syntax_error(), "SyntaxError: invalid syntax"),
    ],
)
def test_what_an_exception_says_error_line_is_its_cause_and_no_hint(error: BaseException, said: str) -> None:
    assert error_line(error) == said
