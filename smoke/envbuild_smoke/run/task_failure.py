"""Why a task was not done by all of its ranks."""

from envbuild_smoke.rank_context import failure_record_path
from envbuild_smoke.run import failure
from envbuild_smoke.run.pool import FORKSERVER_LOG
from envbuild_smoke.run.results import Failure
from envbuild_smoke.run.task_run import TaskRun


def failure_of(run: TaskRun, progress: str) -> Failure | None:
    """Return why a task that ended was not done by all of its ranks; None when it was."""
    cause = _failure_of_ranks(run)
    if cause is not None:
        return cause
    if run.timed_out_at is not None:
        return _timeout(run, progress)
    if run.lost_its_server:
        message = f"the fork server died, and its ranks with it; see {FORKSERVER_LOG}"
        return Failure(kind="exit", message=message)
    return None


def only_lost_its_server(run: TaskRun) -> bool:
    """Return whether a task failed through the death of the fork server alone: none of its ranks had failed."""
    return run.lost_its_server and run.timed_out_at is None and _failure_of_ranks(run) is None


def _failure_of_ranks(run: TaskRun) -> Failure | None:
    """Return the failure of the rank that failed first, None if none failed by itself."""
    task = run.task
    until = float("inf") if run.timed_out_at is None else run.timed_out_at
    records = {}
    for rank in range(task.world_size):
        record = failure.read_record(failure_record_path(task.out, task.case.id, rank))
        # What a rank raises after its time limit is not why it took so long.
        if record is not None and float(record["monotonic_seconds"]) <= until:
            records[rank] = record
    ends = [end for end in run.ends.values() if end.rank in records or end.seen_at <= until]
    cause = failure.earliest(ends, records, task.log_name)
    if cause is None and run.lost_its_server and records:
        # It raised, and the fork server died before it could report the end.
        rank = min(records, key=lambda rank: float(records[rank]["monotonic_seconds"]))
        kind, message = records[rank]["kind"], str(records[rank]["message"])
        return Failure(kind=kind, message=message, rank=rank, log=task.log_name(rank))
    return cause


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
