"""Which rank failed first, from what was seen and what was written."""

from __future__ import annotations

import pytest

from envbuild_smoke.error_line import error_line
from envbuild_smoke.run.failure import earliest
from envbuild_smoke.run.task_run import RankEnd


def end(rank: int, exit_status: int, seen_at: float, *, killed: bool = False, done: bool = False) -> RankEnd:
    return RankEnd(rank=rank, exit_status=exit_status, seen_at=seen_at, killed_by_runner=killed, done=done)


def record(at: float, message: str = "ValueError: x") -> dict[str, object]:
    return {"monotonic_seconds": at, "kind": "exception", "message": message}


def log_name(rank: int) -> str:
    return f"cases/c/rank{rank}.log"


BROKEN = {"monotonic_seconds": 1.0, "kind": "not-finite", "message": "FloatingPointError: step 2: loss is nan"}


@pytest.mark.parametrize(
    ("ends", "records", "expected"),
    [
        ([end(0, 0, 1.0, done=True), end(1, -9, 2.0, done=True)], {}, None),
        # The runner killed it: no cause.
        ([end(0, -9, 1.0, killed=True)], {}, None),
        (
            [end(0, -9, 1.0, killed=True), end(1, 1, 2.0)],
            {},
            (1, "exit", 1, "exited with status 1 without an exception"),
        ),
        # An end before the task is done is a failure whatever the status.
        ([end(0, 0, 1.0, done=True), end(1, 0, 2.0)], {}, (1, "exit", 0, "exited with status 0 without an exception")),
        ([end(0, 1, 2.0)], {0: BROKEN}, (0, "not-finite", 1, "FloatingPointError: step 2: loss is nan")),
        # The records decide, not the order of exits.
        ([end(0, 1, 1.0), end(1, 1, 3.0)], {0: record(0.9), 1: record(0.5, "cause")}, (1, "exception", 1, "cause")),
        # A death is seen later than it happened, but one long after an exception is no cause.
        ([end(0, 1, 1.0), end(1, -11, 1.2)], {0: record(0.9)}, (1, "signal", -11, "killed by SIGSEGV")),
        ([end(0, 1, 1.0), end(1, -6, 9.0)], {0: record(0.9)}, (0, "exception", 1, "ValueError: x")),
        # It raised before it was killed.
        (
            [end(0, -9, 5.0, killed=True), end(1, 1, 4.0)],
            {0: record(1.0, "cause"), 1: record(2.0)},
            (0, "exception", -9, "cause"),
        ),
        ([end(0, -63, 1.0)], {}, (0, "signal", -63, "killed by signal 63")),
    ],
)
def test_rank_that_failed_first(
    ends: list[RankEnd], records: dict[int, dict[str, object]], expected: tuple[int, str, int, str] | None
) -> None:
    found = earliest(ends, records, log_name)
    if expected is None:
        assert found is None
        return
    assert found is not None
    rank, kind, status, message = expected
    assert (found.rank, found.kind, found.exit_status, found.log) == (rank, kind, status, log_name(rank))
    assert found.message.startswith(message)


def syntax_error() -> SyntaxError:
    try:
        compile("a b", "file.py", "exec")
    except SyntaxError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "line"),
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
def test_error_line_is_the_cause_without_hints(error: BaseException, line: str) -> None:
    assert error_line(error) == line
