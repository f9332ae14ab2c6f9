"""Runs a plan: packs its cases onto the devices, watches them, and writes down what became of each."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from envbuild_smoke import environment, resume, run_line
from envbuild_smoke.bandwidth import sweep_result, sweep_task
from envbuild_smoke.case_run import CaseRun, Emit, failure_of
from envbuild_smoke.drivers import MODULES as DRIVERS
from envbuild_smoke.gpus import Gpu
from envbuild_smoke.jobs import Key, RunJob, job_key, make_jobs
from envbuild_smoke.packing import Packer, Start
from envbuild_smoke.plan import Case, Plan
from envbuild_smoke.pool import TEMPLATE_LOG, Pool
from envbuild_smoke.program import RankProgram
from envbuild_smoke.rank import RankContext
from envbuild_smoke.ranks import TemplateError
from envbuild_smoke.results import SCHEMA, CaseResult, Failure, ResultsWriter, now
from envbuild_smoke.task_run import Task, TaskRun, repeat_folder

# Importing from the network disk of a cold node takes minutes.
IMPORT_LIMIT_SECONDS = 600.0
# Ends of ranks wake the runner at once; steps and time limits are looked at this often.
POLL_SECONDS = 0.05

Isolation = Literal["live", "process"]


class UnusableEnvironmentError(Exception):
    """The environment cannot run the plan at all: a library is missing, or torch sees too few GPUs."""


class RunInterruptedError(Exception):
    """The run was told to stop (SIGINT, SIGTERM)."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run: on which GPUs (empty on the CPU), with what isolation, going on with results or not.

    `image` is what machine.image returned of the file that the image was started from.
    """

    gpus: tuple[Gpu, ...] = ()
    isolation: Isolation = "live"
    resume: bool = False
    image: Mapping[str, Any] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks get in their environment: nvidia-smi's order, so that torch counts GPUs as it does."""
        uuids = ",".join(gpu.uuid for gpu in self.gpus)
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": uuids} if self.gpus else {}


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
        options.variables,
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
        self._results: dict[Key, CaseResult] = {} if before is None else dict(before.cases)
        # Baselines that completed, and did not when they ran again for their checkpoint.
        self._lost: dict[Key, CaseResult] = {}
        # Runs that ended and wait for the comparison of their weights.
        self._held: dict[Key, CaseResult] = {}
        self._running: dict[str, CaseRun | TaskRun] = {}
        self._jobs: dict[str, RunJob] = {}
        self._began = time.monotonic()
        self._started = 0

    def run(self, cases: tuple[Case, ...]) -> list[CaseResult]:
        """Run the cases and write the results file, from its first line to its last."""
        wanted = [(case.id, repeat) for case in cases for repeat in range(1, self._plan.repeats + 1)]
        if self._before is not None and self._before.ended and self._results.keys() >= set(wanted):
            return [self._results[run] for run in wanted]
        started_at = now()
        self._pool.start_template()
        # While the template imports.
        files = environment.file_findings(self._plan.expected_versions)
        ready: dict[str, Any] = {}
        unusable: str | None = None
        try:
            ready = self._wait_for_template()
            unusable = self._too_few_gpus(ready["cuda_devices"])
        except TemplateError as error:
            unusable = str(error)
        devices = self._devices(cases)
        line = run_line.make(self._plan, self._options, ready, files, started_at, devices, unusable)
        if self._before is not None:
            resume.demand_same(self._before, line)
            resume.reopen(self._out, self._before)
        # Only now: a run that was interrupted while it imported leaves no results behind, not empty ones.
        writer = ResultsWriter(self._out, resumed=self._before is not None)
        try:
            if self._before is None:
                writer.write(line)
            else:
                cut = {"cut_bytes": self._before.cut_bytes}
                writer.write({"schema": SCHEMA, "type": "resumed", "at": now(), **cut})
                self._emit({"event": "resumed", "kept": len(self._results), **cut})
            if unusable is None:
                self._run_jobs(cases, devices, writer)
                self._run_bandwidth(writer, devices)
            completed = sum(result.status == "completed" for result in self._results.values())
            end = {"cases": len(self._results), "completed": completed, "finished_at": now()}
            writer.write({"schema": SCHEMA, "type": "end", **end})
        finally:
            writer.close()
        if unusable is not None:
            raise UnusableEnvironmentError(unusable)
        return [self._results[run] for run in wanted]

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
                raise TemplateError(f"the libraries cannot be imported: {event['error']}")
            else:
                raise TemplateError(f"the process died while it imported the libraries; see {TEMPLATE_LOG}")
        raise TemplateError(f"importing the libraries took more than {IMPORT_LIMIT_SECONDS:g} s")

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

    def _run_jobs(self, cases: Sequence[Case], devices: Sequence[int], writer: ResultsWriter) -> None:
        again = frozenset() if self._before is None else self._checkpoints_missing(cases)
        done = {run: result.status == "completed" for run, result in self._results.items()}
        self._jobs = make_jobs(cases, self._plan.repeats, done, again)
        packer = Packer([job.job for job in self._jobs.values()], devices)
        while not packer.done:
            if self._stop.is_set():
                self._interrupt()
            self._drop_hopeless(packer, writer)
            for start in packer.start(time.monotonic()):
                self._start(start, packer, writer)
            if self._running:
                self._pool.wait(POLL_SECONDS)
                self._look(packer, writer)

    def _checkpoints_missing(self, cases: Sequence[Case]) -> frozenset[Key]:
        """Return the baselines that completed, whose checkpoints are needed and no longer there."""
        missing = set()
        for case in cases:
            for repeat in range(1, self._plan.repeats + 1):
                if case.baseline is None or (case.id, repeat) in self._results:
                    continue
                baseline = self._results.get((case.baseline, repeat))
                if baseline is None or baseline.status != "completed":
                    continue
                context = self._context(self._plan.case(case.baseline), repeat)
                wanted = [context.checkpoint, *([context.final_checkpoint] if case.compare_weights else [])]
                if not all(path.is_dir() for path in wanted):
                    missing.add((case.baseline, repeat))
        return frozenset(missing)

    def _context(self, case: Case, repeat: int) -> RankContext:
        return RankContext(
            case=case,
            model=self._plan.models[case.model],
            device=self._plan.device,
            out=repeat_folder(self._out, repeat),
            rank=0,
            port=0,
            listener=None,
        )

    def _drop_hopeless(self, packer: Packer, writer: ResultsWriter) -> None:
        """Take out what waits for something that did not complete."""
        for job in packer.waiting:
            found = self._jobs[job.key]
            if found.kind == "compare":
                if not self._comparable(found):
                    packer.dropped(job.key)
                    self._finish(self._held.pop((found.case.id, found.repeat), None), writer)
            elif (failure := self._missing_baseline(found)) is not None:
                packer.dropped(job.key)
                result = CaseResult(case=found.case.id, repeat=found.repeat, status="not-run", failure=failure)
                self._finish(result, writer)

    def _missing_baseline(self, job: RunJob) -> Failure | None:
        """Return why a case cannot start, or will not: its baseline did not complete."""
        if job.case.baseline is None:
            return None
        run = (job.case.baseline, job.repeat)
        baseline = self._lost.get(run) or self._results.get(run)
        if baseline is None or baseline.status == "completed":
            return None
        message = f"baseline {job.case.baseline} {baseline.status}: no weights to start from"
        return Failure(kind="baseline-missing", message=message)

    def _comparable(self, job: RunJob) -> bool:
        """False when a case or its baseline ended without weights that could be compared."""
        own = self._held.get((job.case.id, job.repeat)) or self._results.get((job.case.id, job.repeat))
        run = (str(job.case.baseline), job.repeat)
        baseline = self._lost.get(run) or self._results.get(run)
        return all(result is None or result.status == "completed" for result in (own, baseline))

    def _start(self, start: Start, packer: Packer, writer: ResultsWriter) -> None:
        found = self._jobs[start.job.key]
        moment = time.monotonic()
        try:
            if self._pool.template_event is None or self._pool.template_event["event"] != "ready":
                self._wait_for_template()
            limit = found.case.time_limit_seconds
            task = Task(
                kind=found.kind,
                case=found.case,
                repeat=found.repeat,
                root=self._out,
                world_size=start.job.world_size,
                limit_seconds=limit,
            )
            if found.kind == "case":
                self._tell_start(found, start)
            on_cuda = self._plan.device == "cuda"
            run: CaseRun | TaskRun
            if found.kind == "case":
                run = CaseRun(task, self._pool, start.devices, on_cuda=on_cuda, emit=self._emit, now=moment)
            else:
                run = TaskRun(task, self._pool, start.devices, on_cuda, moment)
            self._running[start.job.key] = run
        except TemplateError as error:
            cause = Failure(kind="exit", message=str(error), log=TEMPLATE_LOG)
            result = CaseResult(case=found.case.id, repeat=found.repeat, status="failed", failure=cause)
            packer.ended(start.job.key)
            self._finish(result, writer)

    def _tell_start(self, found: RunJob, start: Start) -> None:
        self._started += 1
        total = sum(job.kind == "case" for job in self._jobs.values())
        event = {"event": "case-started", "case": found.case.id, "repeat": found.repeat, "index": self._started}
        self._emit({**event, "total": total, "devices": list(self._ids(start.devices))})

    def _look(self, packer: Packer, writer: ResultsWriter) -> None:
        moment = time.monotonic()
        for key, run in list(self._running.items()):
            found = self._jobs[key]
            ended = run.look(moment)
            if isinstance(run, CaseRun) and run.weights_saved:
                packer.weights_saved(key)
            if not ended:
                continue
            del self._running[key]
            packer.ended(key)
            if isinstance(run, CaseRun):
                started = run.run.began - self._began
                self._case_ended(found, run.result(started, self._ids(run.run.devices)), writer)
            else:
                self._comparison_ended(found, run, writer)

    def _case_ended(self, found: RunJob, result: CaseResult, writer: ResultsWriter) -> None:
        run = (found.case.id, found.repeat)
        if found.again:
            if result.status != "completed":
                # Its dependents are told of this one; its own result of the first time stands in the file.
                self._lost[run] = result
            return
        if result.status == "completed" and job_key(*run) + " weights" in self._jobs:
            self._held[run] = result
            return
        self._finish(result, writer)

    def _comparison_ended(self, found: RunJob, run: TaskRun, writer: ResultsWriter) -> None:
        result = self._held.pop((found.case.id, found.repeat))
        cause = failure_of(run, "the comparison of the weights")
        if cause is None:
            result = replace(result, weights=run.answers[0])
        else:
            told = replace(cause, message=f"comparing the final weights: {cause.message}")
            result = replace(result, status="failed", failure=told)
        self._finish(result, writer)

    def _finish(self, result: CaseResult | None, writer: ResultsWriter) -> None:
        if result is None:
            return
        # On disk before anyone is told.
        writer.write(result.as_line())
        self._results[result.case, result.repeat] = result
        end = {"status": result.status, "seconds": round(result.seconds, 3)}
        self._emit({"event": "case-finished", "case": result.case, "repeat": result.repeat, **end})

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
        with suppress(TemplateError):
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
