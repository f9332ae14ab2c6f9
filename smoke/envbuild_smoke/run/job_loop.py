"""Runs the jobs of a run: starts them in the scheduler's order, watches them, and records their results."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from envbuild_smoke.environment.foreign_modules import ListedFiles
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.results import CaseLine, Failure, Weights
from envbuild_smoke.run.case_run import CaseRun
from envbuild_smoke.run.context import POLL_SECONDS, RunContext, RunInterruptedError
from envbuild_smoke.run.failure import failure_of, only_lost_its_server
from envbuild_smoke.run.forkserver import ForkServerError
from envbuild_smoke.run.jobs import RunJob, compare_key
from envbuild_smoke.run.pool import FORKSERVER_LOG
from envbuild_smoke.run.result_log import ResultLog
from envbuild_smoke.run.scheduler import Scheduler, Start
from envbuild_smoke.run.task_run import RankTask, TaskRun


class JobLoop:
    """The jobs of a run on its devices; `listed` are the files that ranks may import."""

    def __init__(
        self,
        context: RunContext,
        jobs: Mapping[str, RunJob],
        devices: Sequence[int],
        log: ResultLog,
        listed: ListedFiles,
    ) -> None:
        self._context = context
        self._jobs = jobs
        self._scheduler = Scheduler([job.job for job in jobs.values()], devices)
        self._log = log
        self._listed = listed
        self._running: dict[str, CaseRun | TaskRun] = {}
        # Jobs that were started a second time, and why.
        self._restarted: dict[str, str] = {}
        self._started = 0

    def run(self) -> None:
        """Run all jobs; raises RunInterruptedError when the run is stopped, after killing what runs."""
        while not self._scheduler.done:
            if self._context.stop.is_set():
                for run in self._running.values():
                    run.kill(time.monotonic())
                raise RunInterruptedError
            self._drop_impossible()
            for start in self._scheduler.start():
                self._start(start)
            if self._running:
                self._context.pool.wait(POLL_SECONDS)
                self._update()

    def _drop_impossible(self) -> None:
        """Take out jobs that wait for something that did not complete."""
        for waiting in self._scheduler.waiting:
            job = self._jobs[waiting.key]
            if job.kind == "compare":
                if not self._log.comparable(job):
                    self._scheduler.dropped(waiting.key)
                    self._log.compared(job.run, None, None)
            elif (failure := self._log.missing_baseline(job)) is not None:
                self._scheduler.dropped(waiting.key)
                case_id, repeat = job.run
                self._log.finish(CaseLine(case=case_id, repeat=repeat, status="not-run", failure=failure))

    def _start(self, start: Start) -> None:
        job, pool = self._jobs[start.job.key], self._context.pool
        now = time.monotonic()
        task = RankTask(
            kind=job.kind,
            case=job.case,
            repeat=job.repeat,
            root=self._context.out,
            world_size=start.job.world_size,
            limit_seconds=job.case.time_limit_seconds,
        )
        try:
            # Also after the fork server died: `wait_for_fork_server` starts another one.
            if not pool.is_ready:
                self._context.wait_for_fork_server()
            if job.kind == "case":
                if start.job.key not in self._restarted:
                    self._report_start(job, start)
                self._running[start.job.key] = CaseRun(task, pool, start.devices, self._context.emit, now)
            else:
                self._running[start.job.key] = TaskRun(task, pool, start.devices, now)
        except ForkServerError as error:
            if self._restart(job, str(error)):
                return
            cause = Failure(kind="exit", message=str(error), log=FORKSERVER_LOG)
            self._scheduler.ended(start.job.key)
            if job.kind == "compare":
                self._log.compared(job.run, None, cause, self._restarted.get(start.job.key))
            else:
                self._case_ended(job, CaseLine(case=job.case.id, repeat=job.repeat, status="failed", failure=cause))

    def _restart(self, job: RunJob, reason: str) -> bool:
        """Let a job that failed through the fork server alone wait for a second start; False after that."""
        key = job.job.key
        if key in self._restarted:
            return False
        self._restarted[key] = reason
        self._scheduler.again(key)
        event = {"event": "case-restarted", "case": job.case.id, "repeat": job.repeat, "message": reason}
        self._context.emit(event)
        return True

    def _report_start(self, job: RunJob, start: Start) -> None:
        self._started += 1
        total = sum(job.kind == "case" for job in self._jobs.values())
        event = {"event": "case-started", "case": job.case.id, "repeat": job.repeat, "index": self._started}
        self._context.emit({**event, "total": total, "devices": list(self._context.device_ids(start.devices))})

    def _update(self) -> None:
        now = time.monotonic()
        # A copy: cases that end are taken out.
        for key, run in list(self._running.items()):
            ended = run.update(now)
            if isinstance(run, CaseRun) and run.weights_saved:
                self._scheduler.weights_saved(key)
            if ended:
                del self._running[key]
                self._ended(self._jobs[key], run)

    def _ended(self, job: RunJob, run: CaseRun | TaskRun) -> None:
        task = run.task_run if isinstance(run, CaseRun) else run
        # The death of the fork server is not the case's fault, unless the case causes it again.
        if only_lost_its_server(task) and self._restart(job, self._context.pool.server_end):
            return
        self._scheduler.ended(job.job.key)
        if isinstance(run, CaseRun):
            started = task.began - self._context.began
            self._case_ended(job, run.result(started, self._context.device_ids(task.devices), self._listed))
        else:
            cause = failure_of(task, "the comparison of the weights")
            weights = read_object(Weights, task.answers[0], "weights") if cause is None else None
            self._log.compared(job.run, weights, cause, self._restarted.get(job.job.key))

    def _case_ended(self, job: RunJob, result: CaseLine) -> None:
        result = replace(result, restarted=self._restarted.get(job.job.key))
        if job.rerun:
            self._log.ran_again(result)
        # Its result is whole with the comparison of its weights, and is written then.
        elif result.status == "completed" and compare_key(job.case.id, job.repeat) in self._jobs:
            self._log.keep_trained(result)
        else:
            self._log.finish(result)
