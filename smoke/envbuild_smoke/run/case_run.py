"""One case from start to end: what its ranks report while they run, and what became of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envbuild_smoke.environment.foreign_modules import ListedFiles
from envbuild_smoke.plan.models import Case
from envbuild_smoke.rank_context import failure_record_path, metrics_path
from envbuild_smoke.run import failure
from envbuild_smoke.run.forkserver import TEMPLATE_NAME
from envbuild_smoke.run.pool import TEMPLATE_LOG, Pool
from envbuild_smoke.run.results import CaseResult, Failure, Status
from envbuild_smoke.run.task_run import RankTask, TaskRun

Emit = Callable[[dict[str, Any]], None]


class CaseRun:
    """A case while it runs; call `look` after every wait, until it returns True, then take `result`."""

    def __init__(
        self, task: RankTask, pool: Pool, devices: tuple[int, ...], *, on_cuda: bool, emit: Emit, now: float
    ) -> None:
        # What an interrupted run left here would be taken for this one's.
        for folder in (task.folder, task.out / "checkpoints" / task.case.id):
            shutil.rmtree(folder, ignore_errors=True)
        self.weights_saved = False
        self.run = TaskRun(task, pool, devices, on_cuda, now)
        self._case: Case = task.case
        self._repeat = task.repeat
        self._reports = metrics_path(task.out, task.case.id)
        self._emit = emit
        self._steps: list[dict[str, Any]] = []
        self._observed: dict[str, Any] | None = None
        self._read = 0

    def look(self, now: float) -> bool:
        """Take note of what was reported and of who ended; True when the case has ended."""
        ended = self.run.look(now)
        self._read_reports()
        return ended

    def result(self, started_seconds: float, device_ids: tuple[int, ...], listed: ListedFiles) -> CaseResult:
        """Return what happened to it; `listed` are the files that its ranks may have imported."""
        status, cause = self._judge()
        startup = None
        if self._steps:
            first = self._steps[0]
            startup = first["monotonic_seconds"] - first["seconds"] - self.run.began
        shown = ("step", "loss", "grad_norm", "seconds")
        observed = {**(self._observed or {}), "libraries": self.run.libraries}
        if foreign := listed.findings(self.run.imported):
            observed["unlisted"] = foreign
        return CaseResult(
            case=self._case.id,
            repeat=self._repeat,
            status=status,
            steps=tuple({name: step[name] for name in shown} for step in self._steps),
            seconds=self.run.ended_at - self.run.began,
            startup_seconds=startup,
            started_seconds=started_seconds,
            devices=device_ids,
            fresh_processes=self.run.fresh,
            observed=observed if self._observed or status == "completed" else None,
            failure=cause,
            logs=tuple(self.run.task.log_name(rank) for rank, log in enumerate(self.run.task.logs) if log.exists()),
        )

    def _read_reports(self) -> None:
        """Take over what was reported since the last look, and pass on what is of interest at once."""
        for report in read_lines(self._reports, self._read):
            self._read += report.length
            content = report.content
            if "weights_saved" in content:
                self.weights_saved = True
                self._emit({"event": "weights-saved", "case": self._case.id, "repeat": self._repeat})
            elif "observed" in content:
                self._observed = content["observed"]
            else:
                self._steps.append(content)
                shown = {name: content[name] for name in ("step", "loss", "grad_norm")}
                self._emit({"event": "step", "case": self._case.id, "repeat": self._repeat, **shown})

    def _judge(self) -> tuple[Status, Failure | None]:
        """Return how the case ended and, unless it completed, why."""
        timed_out = self.run.timed_out_at is not None
        cause = failure_of(self.run, f"{len(self._steps)} of {self._case.training.steps} steps")
        if cause is not None:
            return ("timed-out" if cause.kind == "timeout" and timed_out else "failed"), cause
        problem = self._step_problem()
        if problem is not None:
            log = self.run.task.log_name(self._case.world_size - 1)
            return "failed", Failure(kind="incomplete", message=problem, exit_status=0, log=log)
        return "completed", None

    def _step_problem(self) -> str | None:
        """Say which steps are missing or repeated; None if all are there."""
        numbers = [step["step"] for step in self._steps]
        last = self._case.training.steps
        if numbers == list(range(1, last + 1)):
            return None
        return f"every rank was done, but the steps reported are {numbers}, not 1 to {last}"


class RankReport:
    """A line that a rank wrote, and its length in bytes."""

    def __init__(self, line: bytes) -> None:
        self.content: dict[str, Any] = json.loads(line)
        self.length = len(line)


def read_lines(path: Path, offset: int) -> list[RankReport]:
    """Return the whole lines of a file from `offset` on; the last may still be in the writing."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        return []
    return [RankReport(line) for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True)]


def failure_of(run: TaskRun, progress: str) -> Failure | None:
    """Return why a task that ended was not done by all of its ranks; None when it was."""
    cause = _failure_of_ranks(run)
    if cause is not None:
        return cause
    if run.timed_out_at is not None:
        return _timeout(run, progress)
    if run.template_gone:
        message = f"{TEMPLATE_NAME} died, and they with it; see {TEMPLATE_LOG}"
        return Failure(kind="exit", message=message)
    return None


def went_with_template(run: TaskRun) -> bool:
    """Return whether a task that ended was not done for want of the template alone: no rank of it had failed."""
    return run.template_gone and run.timed_out_at is None and _failure_of_ranks(run) is None


def _failure_of_ranks(run: TaskRun) -> Failure | None:
    """Return the failure of the rank that failed first, None if none failed by itself."""
    task = run.task
    until = float("inf") if run.timed_out_at is None else run.timed_out_at
    records = {}
    for rank in range(task.world_size):
        record = failure.read_record(failure_record_path(task.out, task.case.id, rank))
        # What a rank raises once its time was over says nothing about why it took so long.
        if record is not None and float(record["monotonic_seconds"]) <= until:
            records[rank] = record
    ends = [end for end in run.ends.values() if end.rank in records or end.seen_at <= until]
    cause = failure.earliest(ends, records, task.log_name)
    if cause is None and run.template_gone and records:
        # It raised, and nobody was left to tell of its end.
        rank = min(records, key=lambda rank: float(records[rank]["monotonic_seconds"]))
        kind, message = records[rank]["kind"], str(records[rank]["message"])
        return Failure(kind=kind, message=message, rank=rank, log=task.log_name(rank))
    return cause


def _timeout(run: TaskRun, progress: str) -> Failure:
    task = run.task
    message = f"not done after {task.limit_seconds:g} s, with {progress}; ranks still running: "
    hanging = run.hanging
    message += f"{', '.join(map(str, hanging)) or 'none'}; where each hung is at the end of its log"
    if not hanging:
        return Failure(kind="timeout", message=message)
    first = hanging[0]
    status = run.ends[first].exit_status if first in run.ends else None
    return Failure(kind="timeout", message=message, rank=first, exit_status=status, log=task.log_name(first))
