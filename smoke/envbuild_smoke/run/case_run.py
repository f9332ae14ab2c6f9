"""One case from start to end: what its ranks report while they run, and its result."""

import json
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from envbuild_smoke.environment.foreign_modules import ListedFiles
from envbuild_smoke.plan.json_reader import PlanError, read_object
from envbuild_smoke.plan.models import Case
from envbuild_smoke.rank_context import metrics_path
from envbuild_smoke.results import CaseLine, Failure, Gradient, Observed, Perturbed, ReferenceComparison, Status, Step
from envbuild_smoke.run.failure import failure_of
from envbuild_smoke.run.pool import Pool
from envbuild_smoke.run.results import Emit
from envbuild_smoke.run.task_run import RankTask, TaskRun


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What the driver reports once, by its key in a result."""

    observed: Observed | None = None
    reference: ReferenceComparison | None = None
    gradients: tuple[Gradient, ...] | None = None
    perturbed: tuple[Perturbed, ...] | None = None


class CaseRun:
    """A case while it runs; call `update` after every wait, until it returns True, then take `result`."""

    def __init__(self, task: RankTask, pool: Pool, devices: tuple[int, ...], emit: Emit, now: float) -> None:
        # Files of an interrupted run would be taken for this one's.
        for folder in (task.folder, task.out / "checkpoints" / task.case.id):
            shutil.rmtree(folder, ignore_errors=True)
        self.weights_saved = False
        self.task_run = TaskRun(task, pool, devices, now)
        self._case: Case = task.case
        self._repeat = task.repeat
        self._reports = metrics_path(task.out, task.case.id)
        self._emit = emit
        self._steps: list[dict[str, Any]] = []
        self._reported: dict[str, object] = dict.fromkeys(each.name for each in fields(Reported))
        self._read = 0

    def update(self, now: float) -> bool:
        """Note what was reported and which ranks ended; True when the case has ended."""
        ended = self.task_run.update(now)
        self._read_reports()
        return ended

    def kill(self, now: float) -> None:
        """End its ranks now."""
        self.task_run.kill(now)

    def result(self, started_seconds: float, device_ids: tuple[int, ...], listed: ListedFiles) -> CaseLine:
        """Return its result; `listed` are the files that its ranks may import."""
        status, cause = self._status()
        task = self.task_run.task
        startup = None
        if self._steps:
            first = self._steps[0]
            # Steps are reported at their end.
            startup = first["monotonic_seconds"] - first["seconds"] - self.task_run.began
        shown = ("step", "loss", "grad_norm", "seconds")
        reported = dict(self._reported)
        if isinstance(reported["observed"], dict):
            # Those of all ranks: what one of them opened or imported late is not in the report of the driver.
            seen = {"libraries": self.task_run.libraries, "unlisted": listed.findings(self.task_run.imported)}
            reported["observed"] = {**reported["observed"], **seen}
        try:
            read = read_object(Reported, reported, "its report")
        except PlanError as error:
            # A report that is not of its type fails its case, and not the run.
            status, cause, read = "failed", Failure(kind="incomplete", message=str(error)), Reported()
        return CaseLine(
            case=self._case.id,
            repeat=self._repeat,
            status=status,
            steps=tuple(Step(**{name: step[name] for name in shown}) for step in self._steps),
            seconds=self.task_run.ended_at - self.task_run.began,
            startup_seconds=startup,
            started_seconds=started_seconds,
            devices=device_ids,
            fresh_processes=self.task_run.fresh,
            **vars(read),
            failure=cause,
            logs=tuple(task.log_name(rank) for rank, log in enumerate(task.logs) if log.exists()),
        )

    def _read_reports(self) -> None:
        """Read what was reported since the last update, and emit its events."""
        lines = read_lines(self._reports, self._read)
        # An incomplete line is read again when the rest of it is there.
        self._read += len(lines)
        for line in lines.splitlines():
            content = json.loads(line)
            if "weights_saved" in content:
                self.weights_saved = True
                self._emit({"event": "weights-saved", "case": self._case.id, "repeat": self._repeat})
            elif name := next((name for name in self._reported if name in content), None):
                self._reported[name] = content[name]
            else:
                self._steps.append(content)
                shown = {name: content[name] for name in ("step", "loss", "grad_norm")}
                self._emit({"event": "step", "case": self._case.id, "repeat": self._repeat, **shown})

    def _status(self) -> tuple[Status, Failure | None]:
        """Return how the case ended and, unless it completed, why."""
        timed_out = self.task_run.timed_out_at is not None
        cause = failure_of(self.task_run, f"{len(self._steps)} of {self._case.training.steps} steps")
        if cause is not None:
            return ("timed-out" if cause.kind == "timeout" and timed_out else "failed"), cause
        problem = self._step_problem()
        if problem is not None:
            # The last rank is of the last pipeline stage, which reports.
            log = self.task_run.task.log_name(self._case.world_size - 1)
            return "failed", Failure(kind="incomplete", message=problem, exit_status=0, log=log)
        return "completed", None

    def _step_problem(self) -> str | None:
        """Return which steps are missing or repeated; None if all were reported once."""
        numbers = [step["step"] for step in self._steps]
        last = self._case.training.steps
        if numbers == list(range(1, last + 1)):
            return None
        return f"every rank was done, but the steps reported are {numbers}, not 1 to {last}"


def read_lines(path: Path, offset: int) -> bytes:
    """Return the whole lines of a file from `offset` on; the last one may be incomplete."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        return b""
    return content[: content.rfind(b"\n") + 1]
