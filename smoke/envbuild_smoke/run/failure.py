"""Why a task was not done by all of its ranks, and which rank failed first.

When one rank fails, its peers fail soon after because their connections break. All of them leave traces;
one of them is the cause.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from envbuild_smoke.rank_context import RaisedFailure
from envbuild_smoke.results import Failure, FailureKind
from envbuild_smoke.run.forkserver import signal_name
from envbuild_smoke.run.pool import FORKSERVER_LOG
from envbuild_smoke.run.task_run import RankEnd, TaskRun

# A rank that dies without raising (a signal, os._exit) is seen only after its peers noticed their broken
# connections: the kernel closes its sockets first. Such a death counts as this much earlier than seen.
DEATH_SEEN_LATE_SECONDS = 0.5
_NCCL_WARNING = "NCCL WARN "


def failure_of(run: TaskRun, progress: str) -> Failure | None:
    """Return why a task that ended was not done by all of its ranks; None when it was."""
    if node := run.lost_node:
        # Ranks on other nodes fail by it, and that is seen before the node counts as lost.
        return Failure(kind="node-lost", message=node)
    cause = _failure_of_ranks(run) or (_timeout(run, progress) if run.timed_out_at is not None else None)
    if cause is not None:
        return cause if cause.rank is None else replace(cause, node=run.processes[cause.rank].node)
    if run.lost_its_server:
        message = f"the fork server died, and its ranks with it; see {FORKSERVER_LOG}"
        return Failure(kind="exit", message=message)
    return None


def only_lost_its_server(run: TaskRun) -> bool:
    """Return whether a task failed through the death of the fork server alone: none of its ranks had failed."""
    return run.lost_its_server and not run.lost_node and run.timed_out_at is None and _failure_of_ranks(run) is None


def _failure_of_ranks(run: TaskRun) -> Failure | None:
    """Return the failure of the rank that failed first, None if none failed by itself."""
    task = run.task
    until = float("inf") if run.timed_out_at is None else run.timed_out_at
    # What a rank raises after its time limit is not why it took so long.
    raised = {
        rank: process.raised
        for rank, process in enumerate(run.processes)
        if process.raised is not None and process.raised.monotonic_seconds <= until
    }
    ends = [end for end in run.ends.values() if end.rank in raised or end.seen_at <= until]
    if run.lost_its_server:
        # A rank may have raised, and the fork server died before it could report the end.
        ends += [RankEnd(rank=rank, exit_status=None, seen_at=until) for rank in raised if rank not in run.ends]
    first = earliest(ends, raised, task.log_name)
    return first and with_reason_of_nccl(first, task.root)


def with_reason_of_nccl(failure: Failure, root: Path) -> Failure:
    """Return a failure in NCCL with the first warning in the rank's log.

    torch's own message stays the same whatever happened, "unhandled cuda error": so it was on 2x H100 when another
    process had taken the memory. NCCL's warning names the CUDA error.
    """
    if "NCCL" not in failure.message or failure.log is None:
        return failure
    log = (root / failure.log).read_text(encoding="utf-8", errors="replace")
    warned = next((line for line in log.splitlines() if _NCCL_WARNING in line), None)
    if warned is None:
        return failure
    return replace(failure, message=f"{failure.message}; NCCL warns: {warned.partition(_NCCL_WARNING)[2].strip()}")


def earliest(
    ends: list[RankEnd], raised: Mapping[int, RaisedFailure], log_name: Callable[[int], str]
) -> Failure | None:
    """Return the failure of the rank that failed first, or None if none failed by itself.

    `raised` holds, by rank, what ranks that raised reported at that moment. A rank that ends before its task
    is done has failed, whatever its exit status.
    """
    failed = [end for end in ends if end.rank in raised or not (end.done or end.killed_by_runner)]
    if not failed:
        return None

    def moment(end: RankEnd) -> float:
        if end.rank in raised:
            return raised[end.rank].monotonic_seconds
        return end.seen_at - DEATH_SEEN_LATE_SECONDS

    # Equal moments happen only in tests; the lower rank makes the answer the same every time.
    first = min(failed, key=lambda end: (moment(end), end.rank))
    status = first.exit_status
    kind: FailureKind
    if first.rank in raised:
        kind, message = raised[first.rank].kind, raised[first.rank].message
    elif status is not None and status < 0:
        kind, message = _kind_of_death(-status), f"killed by {signal_name(-status)}"
    else:
        kind, message = "exit", f"exited with status {status} without an exception, before it was done"
    return Failure(rank=first.rank, exit_status=status, kind=kind, message=message, log=log_name(first.rank))


def _kind_of_death(number: int) -> FailureKind:
    return "terminated" if number == signal.SIGTERM else "signal"


def _timeout(run: TaskRun, progress: str) -> Failure:
    task = run.task
    message = f"not done after {task.limit_seconds:g} s, with {progress}; ranks still running: "
    hanging = run.hanging
    message += f"{', '.join(map(str, hanging)) or 'none'}; where each hung is at the end of its log"
    if not hanging:
        return Failure(kind="timeout", message=message)
    first = hanging[0]
    status = run.ends[first].exit_status if first in run.ends else None
    return Failure(kind="timeout", message=message, rank=first, exit_status=status, log=task.log_name(first))
