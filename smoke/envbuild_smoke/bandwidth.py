"""The bandwidth sweep: an all_reduce over all ranks, after the cases."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from envbuild_smoke.case_run import failure_of
from envbuild_smoke.plan import Bandwidth, Plan
from envbuild_smoke.rank_loop import BANDWIDTH, case_of
from envbuild_smoke.results import Failure
from envbuild_smoke.task_run import Task, TaskRun

LIMIT_SECONDS = 300.0
# NCCL says which way its ranks talk only as it starts, and only then does it read these.
_NCCL_LOG = (("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,NET,P2P,SHM,GRAPH"))
_TRANSPORT = re.compile(r"NCCL INFO Channel .* via ([A-Za-z0-9]+(?:/[A-Za-z0-9]+)*)")


def sweep_task(plan: Plan, wanted: Bandwidth, out: Path) -> Task:
    """Return the task; on GPUs its processes are new, with NCCL's log turned on."""
    return Task(
        kind=BANDWIDTH,
        case=case_of(plan, BANDWIDTH, BANDWIDTH, wanted.ranks),
        repeat=1,
        out=out,
        world_size=wanted.ranks,
        limit_seconds=LIMIT_SECONDS,
        sizes=wanted.sizes_bytes,
        variables=_NCCL_LOG if plan.device == "cuda" else (),
    )


def sweep_result(plan: Plan, wanted: Bandwidth, run: TaskRun | None) -> dict[str, Any]:
    """Return the fields of the results' line; `run` is None when the sweep could not start."""
    if run is None:
        failure: Failure | None = Failure(
            kind="exit", message="the process that ranks are forked from cannot be started"
        )
    else:
        failure = failure_of(run, "the sweep")
    points = run.answers[0] if run is not None and failure is None else []
    on_cuda = plan.device == "cuda"
    return {
        "ranks": wanted.ranks,
        "backend": "nccl" if on_cuda else "gloo",
        "transports": transports(run.task.logs) if on_cuda and run is not None else None,
        "points": points,
        "failure": None if failure is None else asdict(failure),
    }


def transports(logs: tuple[Path, ...]) -> list[str]:
    """Return the transports that NCCL's log lines name, as "P2P/CUMEM"."""
    found: set[str] = set()
    for log in logs:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        found.update(_TRANSPORT.findall(text))
    return sorted(found)
