"""Which rank failed first.

When one rank fails, its peers fail soon after because their connections break. All of them leave traces;
one of them is the cause.
"""

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild_smoke.run.results import Failure, FailureKind

# A rank that dies without raising (a signal, os._exit) is seen only after its peers noticed their broken
# connections: the kernel closes its sockets first. Such a death counts as this much earlier than seen.
DEATH_SEEN_LATE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank process ended: exit status (negative: a signal), and when it was seen (monotonic seconds).

    `done` is true when its task was done by then.
    """

    rank: int
    exit_status: int
    seen_at: float
    killed_by_runner: bool
    done: bool = False


def earliest(
    ends: list[RankEnd], records: Mapping[int, Mapping[str, Any]], log_name: Callable[[int], str]
) -> Failure | None:
    """Return the failure of the rank that failed first, or None if none failed by itself.

    `records` holds, by rank, what ranks that raised wrote down at that moment. A rank that ends before its task
    is done has failed, whatever its exit status.
    """
    failed = [end for end in ends if end.rank in records or not (end.done or end.killed_by_runner)]
    if not failed:
        return None

    def moment(end: RankEnd) -> float:
        if end.rank in records:
            return float(records[end.rank]["monotonic_seconds"])
        return end.seen_at - DEATH_SEEN_LATE_SECONDS

    # Equal moments happen only in tests; the lower rank makes the answer the same every time.
    first = min(failed, key=lambda end: (moment(end), end.rank))
    status = first.exit_status
    kind: FailureKind
    if first.rank in records:
        kind, message = records[first.rank]["kind"], str(records[first.rank]["message"])
    elif status < 0:
        kind, message = "signal", f"killed by {signal_name(-status)}"
    else:
        kind, message = "exit", f"exited with status {status} without an exception, before it was done"
    return Failure(rank=first.rank, exit_status=status, kind=kind, message=message, log=log_name(first.rank))


def read_record(path: Path) -> Mapping[str, Any] | None:
    """Return what a rank wrote when it raised, or None."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    # A rank that was killed wrote none.
    except FileNotFoundError:
        return None
    return record if isinstance(record, dict) else None


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, and the number for a signal without a name."""
    try:
        # Real-time signals have no name in Python but SIGRTMIN and SIGRTMAX.
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
