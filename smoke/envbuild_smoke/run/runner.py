"""Runs a plan: packs its cases onto the devices, watches them, and writes down what became of each."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from envbuild_smoke.drivers import MODULES as DRIVERS
from envbuild_smoke.environment.findings import file_findings
from envbuild_smoke.environment.foreign_modules import ListedFiles
from envbuild_smoke.plan.models import Case, Plan
from envbuild_smoke.rank_context import FINAL, checkpoint_path
from envbuild_smoke.ranks.program import RankProgram
from envbuild_smoke.run import resume, run_header
from envbuild_smoke.run.case_run import CaseRun, Emit, failure_of, went_with_template
from envbuild_smoke.run.forkserver import ForkServerError
from envbuild_smoke.run.jobs import RunJob, compare_key, make_jobs
from envbuild_smoke.run.options import Options, cache_variables
from envbuild_smoke.run.pool import TEMPLATE_LOG, Pool
from envbuild_smoke.run.result_log import ResultLog
from envbuild_smoke.run.results import SCHEMA, CaseResult, Failure, ResultsWriter, now
from envbuild_smoke.run.scheduler import Scheduler, Start
from envbuild_smoke.run.sweep import sweep_result, sweep_task
from envbuild_smoke.run.task_run import RankTask, TaskRun, repeat_folder

# Importing from the network disk of a cold node takes minutes.
IMPORT_LIMIT_SECONDS = 600.0
# Ends of ranks wake the runner at once; steps and time limits are looked at this often.
POLL_SECONDS = 0.05


class UnusableEnvironmentError(Exception):
    """The environment cannot run the plan at all: a library is missing, or torch sees too few GPUs."""


class RunInterruptedError(Exception):
    """The run was told to stop (SIGINT, SIGTERM)."""


def run_plan(
    plan: Plan,
    cases: tuple[Case, ...],
    out: Path,
    *,
    emit: Emit,
    stop: threading.Event,
    program: RankProgram | None = None,
    options: Options | None = None,
) -> list[CaseResult]:
    """Run `cases` of `plan` into the directory `out`, which must not hold results yet unless they are resumed.

    `emit` gets the progress events. Setting `stop` kills what runs and raises RunInterruptedError; the results of
    cases that had ended stay. Raises UnusableEnvironmentError before the first case, or never, and ResumeError
    when what is in `out` is not this run's. `program` is what the ranks run, by default the drivers of the plan.
    """
    options = options or Options()
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    drivers = tuple(sorted({DRIVERS[case.driver] for case in plan.cases}))
    program = program or RankProgram(preload=drivers)
    lock = resume.take_lock(out)
    before = resume.read_before(out, plan) if options.resume else None
    pool = Pool(
        replace(program, modules=plan.expected_modules),
        plan,
        out,
        lock,
        {**options.variables, **(cache_variables(out) if plan.device == "cuda" else {})},
        live=options.isolation == "live",
    )
    runner = _Runner(plan, out, emit, stop, pool, options, before)
    try:
        return runner.run(cases)
    finally:
        pool.close()
        resume.release_lock(lock)


class _Runner:
    def __init__(
        self,
        plan: Plan,
        out: Path,
        emit: Emit,
        stop: threading.Event,
        pool: Pool,
        options: Options,
        before: resume.Before | None,
    ) -> None:
        self._plan = plan
        self._out = out
        self._emit = emit
        self._stop = stop
        self._pool = pool
        self._options = options
        self._before = before
        self._book = ResultLog(out, emit, {} if before is None else before.cases)
        self._running: dict[str, CaseRun | TaskRun] = {}
        self._jobs: dict[str, RunJob] = {}
        # Jobs that are begun a second time, and why.
        self._restarted: dict[str, str] = {}
        self._began = time.monotonic()
        self._started = 0
        self._listed = ListedFiles(())

    def run(self, cases: tuple[Case, ...]) -> list[CaseResult]:
        """Run the cases and write the results file, from its first line to its last."""
        wanted = [(case.id, repeat) for case in cases for repeat in range(1, self._plan.repeats + 1)]
        if self._before is not None and self._before.ended and self._book.results.keys() >= set(wanted):
            return [self._book.results[run] for run in wanted]
        started_at = now()
        self._pool.start_template()
        # While the template imports.
        self._listed = ListedFiles(self._plan.expected_versions, self._plan.provided_packages)
        files = file_findings(self._plan)
        ready: dict[str, Any] = {}
        unusable: str | None = None
        try:
            ready = self._wait_for_template()
            unusable = self._too_few_gpus(ready["cuda_devices"])
        except ForkServerError as error:
            unusable = str(error)
        devices = self._devices(cases)
        line = run_header.make(self._plan, self._options, ready, files, self._listed, started_at, devices, unusable)
        if self._before is not None:
            resume.demand_same(self._before, line)
            resume.reopen(self._out, self._before)
        # Only now: a run that was interrupted while it imported leaves no results behind, not empty ones.
        writer = ResultsWriter(self._out, resumed=self._before is not None)
        self._book.write_to(writer)
        try:
            if self._before is None:
                writer.write(line)
            else:
                cut = {"cut_bytes": self._before.cut_bytes}
                writer.write({"schema": SCHEMA, "type": "resumed", "at": now(), **cut})
                self._emit({"event": "resumed", "kept": len(self._book.results), **cut})
            if unusable is None:
                self._run_jobs(cases, devices)
                self._run_bandwidth(writer, devices)
            results = self._book.results
            completed = sum(result.status == "completed" for result in results.values())
            end = {"cases": len(results), "completed": completed, "finished_at": now()}
            writer.write({"schema": SCHEMA, "type": "end", **end})
        finally:
            writer.close()
        if unusable is not None:
            raise UnusableEnvironmentError(unusable)
        return [results[run] for run in wanted]

    def _wait_for_template(self) -> dict[str, Any]:
        """Return what the template process reports once it has imported everything; raises TemplateError."""
        self._pool.start_template()
        limit = time.monotonic() + IMPORT_LIMIT_SECONDS
        while time.monotonic() < limit:
            if self._stop.is_set():
                raise RunInterruptedError
            event = self._pool.template_event
            if event is None:
                self._pool.wait(POLL_SECONDS)
            elif event["event"] == "ready":
                return event
            elif event["event"] == "unusable":
                raise ForkServerError(f"the libraries cannot be imported: {event['error']}")
            else:
                raise ForkServerError(f"the process died while it imported the libraries; see {TEMPLATE_LOG}")
        raise ForkServerError(f"importing the libraries took more than {IMPORT_LIMIT_SECONDS:g} s")

    def _devices(self, cases: Sequence[Case]) -> tuple[int, ...]:
        """Return the devices, counted from 0: the GPUs, or places for processes on the CPU."""
        if self._plan.device == "cuda":
            return tuple(range(len(self._options.gpus)))
        # Two small cases side by side fill the cores that one leaves idle while its ranks wait for each other.
        largest = max(case.world_size for case in cases)
        ranks = self._plan.bandwidth.ranks if self._plan.bandwidth else 1
        return tuple(range(max(largest, ranks, len(os.sched_getaffinity(0)))))

    def _too_few_gpus(self, seen: int) -> str | None:
        chosen = len(self._options.gpus)
        if self._plan.device == "cpu" or seen >= chosen:
            return None
        return (
            f"nvidia-smi shows {chosen} GPUs to be used; torch sees {seen} (its build, or the driver, is not for them)"
        )

    def _run_jobs(self, cases: Sequence[Case], devices: Sequence[int]) -> None:
        self._jobs = self._jobs_of(cases)
        packer = Scheduler([job.job for job in self._jobs.values()], devices)
        while not packer.done:
            if self._stop.is_set():
                self._interrupt()
            self._drop_hopeless(packer)
            for start in packer.start(time.monotonic()):
                self._start(start, packer)
            if self._running:
                self._pool.wait(POLL_SECONDS)
                self._look(packer)

    def _jobs_of(self, cases: Sequence[Case]) -> dict[str, RunJob]:
        """Return what is to be run: all, or what an interrupted run left over."""
        book, repeats = self._book, self._plan.repeats
        if self._before is None:
            return make_jobs(cases, repeats, (), (), ())
        for case in cases:
            for repeat in range(1, repeats + 1):
                final = checkpoint_path(repeat_folder(self._out, repeat), case.id, FINAL)
                if case.compare_weights and (case.id, repeat) not in book.results and final.is_dir():
                    book.read_trained((case.id, repeat))
        again = resume.checkpoints_missing(self._plan, cases, self._out, book.results, book.trained)
        return make_jobs(cases, repeats, book.results, again, book.trained)

    def _drop_hopeless(self, packer: Scheduler) -> None:
        """Take out what waits for something that did not complete."""
        for job in packer.waiting:
            found = self._jobs[job.key]
            run = found.case.id, found.repeat
            if found.kind == "compare":
                if not self._book.comparable(found):
                    packer.dropped(job.key)
                    self._book.compared(run, None, None)
            elif (failure := self._book.missing_baseline(found)) is not None:
                packer.dropped(job.key)
                self._book.finish(CaseResult(case=run[0], repeat=run[1], status="not-run", failure=failure))

    def _start(self, start: Start, packer: Scheduler) -> None:
        found = self._jobs[start.job.key]
        moment = time.monotonic()
        try:
            if self._pool.template_event is None or self._pool.template_event["event"] != "ready":
                self._wait_for_template()
            limit = found.case.time_limit_seconds
            task = RankTask(
                kind=found.kind,
                case=found.case,
                repeat=found.repeat,
                root=self._out,
                world_size=start.job.world_size,
                limit_seconds=limit,
            )
            if found.kind == "case" and start.job.key not in self._restarted:
                self._tell_start(found, start)
            on_cuda = self._plan.device == "cuda"
            run: CaseRun | TaskRun
            if found.kind == "case":
                run = CaseRun(task, self._pool, start.devices, on_cuda=on_cuda, emit=self._emit, now=moment)
            else:
                run = TaskRun(task, self._pool, start.devices, on_cuda, moment)
            self._running[start.job.key] = run
        except ForkServerError as error:
            if self._begin_again(found, packer, str(error)):
                return
            cause = Failure(kind="exit", message=str(error), log=TEMPLATE_LOG)
            packer.ended(start.job.key)
            if found.kind == "compare":
                self._compared(found, None, cause)
            else:
                self._case_ended(
                    found, CaseResult(case=found.case.id, repeat=found.repeat, status="failed", failure=cause)
                )

    def _begin_again(self, found: RunJob, packer: Scheduler, why: str) -> bool:
        """Let a job that failed with the template, and not by itself, wait to be begun anew; False the second time."""
        key = found.job.key
        if key in self._restarted:
            return False
        self._restarted[key] = why
        packer.again(key)
        self._emit({"event": "case-restarted", "case": found.case.id, "repeat": found.repeat, "message": why})
        return True

    def _tell_start(self, found: RunJob, start: Start) -> None:
        self._started += 1
        total = sum(job.kind == "case" for job in self._jobs.values())
        event = {"event": "case-started", "case": found.case.id, "repeat": found.repeat, "index": self._started}
        self._emit({**event, "total": total, "devices": list(self._ids(start.devices))})

    def _look(self, packer: Scheduler) -> None:
        moment = time.monotonic()
        for key, run in list(self._running.items()):
            found = self._jobs[key]
            ended = run.look(moment)
            if isinstance(run, CaseRun) and run.weights_saved:
                packer.weights_saved(key)
            if not ended:
                continue
            del self._running[key]
            task_run = run.run if isinstance(run, CaseRun) else run
            if went_with_template(task_run) and self._begin_again(found, packer, self._pool.template_end):
                continue
            packer.ended(key)
            if isinstance(run, CaseRun):
                started = run.run.began - self._began
                self._case_ended(found, run.result(started, self._ids(run.run.devices), self._listed))
            else:
                cause = failure_of(run, "the comparison of the weights")
                weights = None if cause is not None else run.answers[0]
                self._compared(found, weights, cause)

    def _compared(self, found: RunJob, weights: Mapping[str, Any] | None, cause: Failure | None) -> None:
        self._book.compared((found.case.id, found.repeat), weights, cause, self._restarted.get(found.job.key))

    def _case_ended(self, found: RunJob, result: CaseResult) -> None:
        result = replace(result, restarted=self._restarted.get(found.job.key))
        if found.again:
            self._book.ran_again(result)
        elif result.status == "completed" and compare_key(found.case.id, found.repeat) in self._jobs:
            self._book.keep_trained(result)
        else:
            self._book.finish(result)

    def _ids(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Return the devices as results have them: nvidia-smi's index of a GPU."""
        gpus = self._options.gpus
        return tuple(gpus[device].index if gpus else device for device in devices)

    def _interrupt(self) -> None:
        for run in self._running.values():
            (run.run if isinstance(run, CaseRun) else run).kill(time.monotonic())
        self._pool.close()
        raise RunInterruptedError

    def _run_bandwidth(self, writer: ResultsWriter, devices: Sequence[int]) -> None:
        wanted = self._plan.bandwidth
        if wanted is None or (self._before is not None and self._before.bandwidth):
            return
        run: TaskRun | None = None
        with suppress(ForkServerError):
            self._wait_for_template()
            task = sweep_task(self._plan, wanted, self._out)
            on_cuda = self._plan.device == "cuda"
            run = TaskRun(task, self._pool, tuple(devices[: wanted.ranks]), on_cuda, time.monotonic())
            while not run.look(time.monotonic()):
                if self._stop.is_set():
                    self._interrupt()
                self._pool.wait(POLL_SECONDS)
        result = sweep_result(wanted, run)
        writer.write({"schema": SCHEMA, "type": "bandwidth", **result})
        self._emit({"event": "bandwidth", **result})
