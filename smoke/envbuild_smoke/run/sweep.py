"""The bandwidth sweep: an all_reduce over all ranks, after the cases."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from envbuild_smoke.plan.models import BandwidthSweep, Plan
from envbuild_smoke.ranks.rank_main import BANDWIDTH, case_of
from envbuild_smoke.run.case_run import failure_of
from envbuild_smoke.run.results import Failure
from envbuild_smoke.run.task_run import RankTask, TaskRun

LIMIT_SECONDS = 300.0


def sweep_task(plan: Plan, wanted: BandwidthSweep, out: Path) -> RankTask:
    """Return the task; its processes are new: only as NCCL starts does it say which way its ranks talk."""
    return RankTask(
        kind=BANDWIDTH,
        case=case_of(plan, BANDWIDTH, BANDWIDTH, wanted.ranks),
        repeat=1,
        root=out,
        world_size=wanted.ranks,
        limit_seconds=LIMIT_SECONDS,
        sizes=wanted.sizes_bytes,
        fresh=True,
    )


def sweep_result(wanted: BandwidthSweep, run: TaskRun | None) -> dict[str, Any]:
    """Return the fields of the results' line; `run` is None when the sweep could not start."""
    answer: dict[str, Any] = {"backend": None, "transports": None, "points": []}
    if run is None:
        failure: Failure | None = Failure(kind="exit", message="the process that ranks are forked from cannot start")
    else:
        failure = failure_of(run, "the sweep")
        if failure is None:
            answer = {name: run.answers[0][name] for name in answer}
    return {"ranks": wanted.ranks, **answer, "failure": None if failure is None else asdict(failure)}
