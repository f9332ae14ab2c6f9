"""Which rank failed first, from what was seen and what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbuild_smoke.error_line import error_line
from envbuild_smoke.rank_context import RaisedFailure
from envbuild_smoke.results import Failure
from envbuild_smoke.run.failure import earliest, with_reason_of_nccl
from envbuild_smoke.run.task_run import RankEnd


def end(rank: int, exit_status: int, seen_at: float, *, killed: bool = False, done: bool = False) -> RankEnd:
    return RankEnd(rank=rank, exit_status=exit_status, seen_at=seen_at, killed_by_runner=killed, done=done)


def record(at: float, message: str = "ValueError: x") -> RaisedFailure:
    return RaisedFailure(monotonic_seconds=at, kind="exception", message=message)


def log_name(rank: int) -> str:
    return f"cases/c/rank{rank}.log"


BROKEN = RaisedFailure(monotonic_seconds=1.0, kind="not-finite", message="FloatingPointError: step 2: loss is nan")


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
        ([end(0, -15, 1.0)], {}, (0, "terminated", -15, "killed by SIGTERM")),
    ],
)
def test_rank_that_failed_first(
    ends: list[RankEnd], records: dict[int, RaisedFailure], expected: tuple[int, str, int, str] | None
) -> None:
    first = earliest(ends, records, log_name)
    if expected is None:
        assert first is None
        return
    assert first is not None
    rank, kind, status, message = expected
    assert (first.rank, first.kind, first.exit_status, first.log) == (rank, kind, status, log_name(rank))
    assert first.message.startswith(message)


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


CUDA_ERROR = "RuntimeError: NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
# As src/debug.cc of NCCL prints it.
WARNED = """\
NCCL version 2.28.9+cuda13.0
[2026-11-26 08:14:03] node1:5701:5701 [1] transport/p2p.cc:275 NCCL WARN Cuda failure 2 'out of memory'
[2026-11-26 08:14:03] node1:5701:5701 [1] init.cc:1512 NCCL WARN Failed to init
"""


@pytest.mark.parametrize(
    ("message", "log", "expected"),
    [
        (CUDA_ERROR, WARNED, f"{CUDA_ERROR}; NCCL warns: Cuda failure 2 'out of memory'"),
        (CUDA_ERROR, "NCCL version 2.28.9+cuda13.0", CUDA_ERROR),
        ("ValueError: x", WARNED, "ValueError: x"),
    ],
)
def test_failure_in_nccl_says_what_nccl_warned_of(tmp_path: Path, message: str, log: str, expected: str) -> None:
    (tmp_path / "rank1.log").write_text(log)
    failure = Failure(rank=1, exit_status=1, kind="exception", message=message, log="rank1.log")
    assert with_reason_of_nccl(failure, tmp_path).message == expected
