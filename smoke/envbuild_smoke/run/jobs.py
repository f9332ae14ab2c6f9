"""The jobs of a run: each case once a repeat, the comparisons of weights, and what waits for what."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from envbuild_smoke.plan.models import Case
from envbuild_smoke.run.scheduler import Job

Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """What a scheduled job does. `rerun` marks a case that completed before and runs for its checkpoint alone."""

    job: Job
    kind: str
    case: Case
    repeat: int
    rerun: bool = False

    @property
    def run(self) -> Key:
        """The case's id and the repeat."""
        return self.case.id, self.repeat


def make_jobs(
    cases: Iterable[Case], repeats: int, done: Collection[Key], rerun: Collection[Key], trained: Collection[Key]
) -> dict[str, RunJob]:
    """Return the jobs by key.

    `done` are the runs that have ended, `rerun` those of them that run once more, `trained` those that wait for
    the comparison of their weights alone.
    """
    jobs: dict[str, RunJob] = {}
    for case in cases:
        for repeat in range(1, repeats + 1):
            run = (case.id, repeat)
            if run in done and run not in rerun:
                continue
            # The checkpoint of a baseline that ended stays, unless it runs again.
            weights_of = None
            if case.baseline is not None:
                before = (case.baseline, repeat)
                weights_of = job_key(*before) if before not in done or before in rerun else None
            key = job_key(case.id, repeat)
            if run not in trained:
                job = Job(key=key, world_size=case.world_size, weights_of=weights_of)
                jobs[key] = RunJob(job=job, kind="case", case=case, repeat=repeat, rerun=run in rerun)
            if case.compare_weights and case.baseline is not None:
                after = tuple(one for one in (key if run not in trained else None, weights_of) if one is not None)
                # Urgent: until then the case's result is not in the results.
                compare = Job(key=compare_key(case.id, repeat), world_size=1, after=after, urgent=True)
                jobs[compare.key] = RunJob(job=compare, kind="compare", case=case, repeat=repeat)
    return jobs


def job_key(case_id: str, repeat: int) -> str:
    """Return the key of a case's run."""
    return f"{case_id} {repeat}"


def compare_key(case_id: str, repeat: int) -> str:
    """Return the key of the comparison of a case's final weights."""
    return f"{case_id} {repeat} weights"
