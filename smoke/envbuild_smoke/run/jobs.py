"""The jobs of a run: each repeat of each case, on its nodes, and what waits for what."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from envbuild_smoke.plan.models import Case, Plan
from envbuild_smoke.run.scheduler import Job

Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """What a scheduled job does."""

    job: Job
    case: Case
    repeat: int


def make_jobs(plan: Plan, cases: Iterable[Case], done: Collection[Key]) -> dict[str, RunJob]:
    """Return the jobs of some cases by key, without the runs that are `done`."""
    jobs: dict[str, RunJob] = {}
    for case in cases:
        for repeat in plan.runs_of(case):
            if (case.id, repeat) in done:
                continue
            # The checkpoint of a baseline that ended stays.
            waits = case.baseline is not None and (case.baseline, repeat) not in done
            job = Job(
                key=job_key(case.id, repeat),
                world_size=case.slots,
                nodes=plan.nodes_of(case, repeat),
                weights_of=job_key(str(case.baseline), repeat) if waits else None,
                needs_final_weights=case.compare_weights,
            )
            jobs[job.key] = RunJob(job=job, case=case, repeat=repeat)
    return jobs


def job_key(case_id: str, repeat: int) -> str:
    """Return the key of a case's run."""
    return f"{case_id} {repeat}"
