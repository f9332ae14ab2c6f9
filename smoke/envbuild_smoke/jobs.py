"""The jobs of a run: each case once a repeat, the comparisons of weights, and what waits for what."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from envbuild_smoke.packing import Job
from envbuild_smoke.plan import Case

# One rank loads two checkpoints.
COMPARE_SECONDS = 3.0

Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """What a packed job stands for; `again` marks a case that ran before and is run for its checkpoint alone."""

    job: Job
    kind: str
    case: Case
    repeat: int
    again: bool = False


def make_jobs(
    cases: Iterable[Case], repeats: int, done: Mapping[Key, bool], again: frozenset[Key]
) -> dict[str, RunJob]:
    """Return the jobs by key; `done` are the runs that have ended, `again` those of them that run once more."""
    jobs: dict[str, RunJob] = {}
    for case in cases:
        for repeat in range(1, repeats + 1):
            run = (case.id, repeat)
            if run in done and run not in again:
                continue
            # A baseline that ended is there for good, unless it runs again.
            before = None if case.baseline is None else (case.baseline, repeat)
            waits = before is not None and (before not in done or before in again)
            weights_of = job_key(*before) if waits and before is not None else None
            key = job_key(case.id, repeat)
            job = Job(key=key, world_size=case.world_size, seconds=case.estimated_seconds, weights_of=weights_of)
            jobs[key] = RunJob(job=job, kind="case", case=case, repeat=repeat, again=run in again)
            if case.compare_weights and case.baseline is not None:
                after = (key,) if weights_of is None else (key, weights_of)
                compare = Job(key=f"{key} weights", world_size=1, seconds=COMPARE_SECONDS, after=after)
                jobs[compare.key] = RunJob(job=compare, kind="compare", case=case, repeat=repeat)
    return jobs


def job_key(case_id: str, repeat: int) -> str:
    """Return the key of a case's run; the key of its comparison is another."""
    return f"{case_id} {repeat}"
