"""Runs the jobs of a run: starts them in the scheduler's order, watches them, and records their results."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from envbuild_smoke.environment.foreign_modules import ListedFiles
from envbuild_smoke.results import CaseLine, Failure, Status
from envbuild_smoke.run import token_watch
from envbuild_smoke.run.case_run import CaseRun
from envbuild_smoke.run.context import MARGIN_SECONDS, POLL_SECONDS, OutOfTimeError, RunContext, RunInterruptedError
from envbuild_smoke.run.failure import only_lost_its_server
from envbuild_smoke.run.forkserver import ForkServerError
from envbuild_smoke.run.jobs import RunJob
from envbuild_smoke.run.pool import FORKSERVER_LOG
from envbuild_smoke.run.result_log import ResultLog
from envbuild_smoke.run.scheduler import Scheduler, Start
from envbuild_smoke.run.task_run import RankTask


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
        self._scheduler = Scheduler([job.job for job in jobs.values()], devices, context.on_node)
        self._log = log
        self._listed = listed
        self._running: dict[str, CaseRun] = {}
        # Jobs that were started a second time, and why.
        self._restarted: dict[str, str] = {}
        self._started = 0

    def run(self) -> None:
        """Run all jobs.

        Raises RunInterruptedError when the run is stopped, after killing what runs, and OutOfTimeError when no time is
        left to start another case, after those that run have ended.
        """
        while not self._scheduler.done:
            if self._context.stop.is_set():
                self._interrupt()
            self._drop_impossible()
            if not self._out_of_time():
                for start in self._scheduler.start():
                    self._start(start)
            elif not self._running:
                raise OutOfTimeError(f"{len(self._scheduler.waiting)} cases")
            if self._running:
                self._context.pool.wait(POLL_SECONDS)
                self._update()

    def _out_of_time(self) -> bool:
        """Return whether a case that starts now would probably not end in time: the longest so far would not."""
        ends_at = self._context.options.ends_at
        longest = max((result.seconds for result in self._log.results.values()), default=0.0)
        return ends_at is not None and time.time() + longest + MARGIN_SECONDS > ends_at

    def _drop_impossible(self) -> None:
        """Drop jobs that wait for something that did not complete, or for a node that is lost."""
        lost = self._context.pool.lost
        for node in lost:
            self._scheduler.lost(node)
        for waiting in self._scheduler.waiting:
            job = self._jobs[waiting.key]
            failure = self._log.missing_baseline(job)
            if failure is None and (missing := lost.keys() & set(waiting.nodes)):
                failure = Failure(kind="node-lost", message="; ".join(lost[node] for node in sorted(missing)))
            if failure is not None:
                self._scheduler.dropped(waiting.key)
                self._finish(_without_ranks(job, "not-run", failure))

    def _start(self, start: Start) -> None:
        job, key = self._jobs[start.job.key], start.job.key
        task = RankTask(
            kind="case",
            case=job.case,
            repeat=job.repeat,
            root=self._context.out,
            world_size=job.case.world_size,
            limit_seconds=job.case.time_limit_seconds,
        )
        now = time.monotonic()

        def begin() -> None:
            if key not in self._restarted:
                self._report_start(job, start)
            self._running[key] = CaseRun(task, self._context.pool, start.devices, self._context.emit, now)

        self._begin(job, begin)

    def _begin(self, job: RunJob, begin: Callable[[], None]) -> None:
        """Begin a case, or its next part; where ranks cannot be started, it is to begin once more or has failed."""
        try:
            # Also after the fork server died: `wait_for_fork_server` starts another one.
            if not self._context.pool.is_ready:
                self._context.wait_for_fork_server()
            begin()
        except ForkServerError as error:
            self._running.pop(job.job.key, None)
            if not self._restart(job, str(error)):
                cause = Failure(kind="exit", message=str(error), log=FORKSERVER_LOG)
                self._ended(job, _without_ranks(job, "failed", cause))

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
        event = {"event": "case-started", "case": job.case.id, "repeat": job.repeat, "index": self._started}
        devices = list(self._context.device_ids(start.devices))
        self._context.emit({**event, "total": len(self._jobs), "devices": devices})

    def _update(self) -> None:
        now = time.monotonic()
        # A copy: cases that end are removed.
        for key, run in list(self._running.items()):
            ended = run.update(now)
            if run.weights_saved:
                self._scheduler.weights_saved(key)
            if not ended:
                continue
            job = self._jobs[key]
            if run.goes_on:
                self._begin(job, partial(run.begin_part, now))
                continue
            del self._running[key]
            # The death of the fork server is not the case's fault, unless the case causes it again.
            if only_lost_its_server(run.task_run) and self._restart(job, self._context.pool.server_end):
                continue
            started = run.began - self._context.began
            self._ended(job, run.result(started, self._context.device_ids(run.devices), self._listed))

    def _ended(self, job: RunJob, result: CaseLine) -> None:
        self._scheduler.ended(job.job.key)
        self._finish(replace(result, restarted=self._restarted.get(job.job.key)))

    def _finish(self, result: CaseLine) -> None:
        """Record a result.

        Raises RunInterruptedError where the run was started again elsewhere: nodes end one after the other, and the
        cases of those that have ended did not fail.
        """
        token_file = self._context.options.token_file
        if token_file is not None and token_watch.is_gone(token_file):
            self._interrupt()
        self._log.finish(result)

    def _interrupt(self) -> NoReturn:
        for run in self._running.values():
            run.kill(time.monotonic())
        raise RunInterruptedError


def _without_ranks(job: RunJob, status: Status, failure: Failure) -> CaseLine:
    """Return the result of a job whose ranks were not started."""
    return CaseLine(case=job.case.id, repeat=job.repeat, nodes=job.job.nodes, status=status, failure=failure)
