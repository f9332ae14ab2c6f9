"""The jobs of a run: each case once a repeat, and what waits for what."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from envbuild_smoke.plan.models import Case
from envbuild_smoke.run.scheduler import Job

Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """What a scheduled job does. `rerun` marks a case that completed before and runs for its checkpoint alone."""

    job: Job
    case: Case
    repeat: int
    rerun: bool = False

    @property
    def run(self) -> Key:
        """The case's id and the repeat."""
        return self.case.id, self.repeat


def make_jobs(
    cases: Iterable[Case], repeats: int, done: Collection[Key] = (), rerun: Collection[Key] = ()
) -> dict[str, RunJob]:
    """Return the jobs by key; `done` are the runs that have ended, `rerun` those of them that run once more."""
    jobs: dict[str, RunJob] = {}
    for case in cases:
        for repeat in range(1, repeats + 1):
            run, before = (case.id, repeat), (str(case.baseline), repeat)
            if run in done and run not in rerun:
                continue
            # The checkpoint of a baseline that ended stays, unless it runs again.
            waits = case.baseline is not None and (before not in done or before in rerun)
            job = Job(
                key=job_key(*run),
                world_size=case.world_size,
                nodes=case.nodes,
                weights_of=job_key(*before) if waits else None,
                needs_final_weights=case.compare_weights,
            )
            jobs[job.key] = RunJob(job=job, case=case, repeat=repeat, rerun=run in rerun)
    return jobs


def job_key(case_id: str, repeat: int) -> str:
    """Return the key of a case's run."""
    return f"{case_id} {repeat}"
