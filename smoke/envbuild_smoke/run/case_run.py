"""One case from start to end: what its ranks report while they run, and its result."""

import shutil
from dataclasses import replace

from envbuild_smoke.environment.foreign_modules import ListedFiles
from envbuild_smoke.plan.models import Case
from envbuild_smoke.rank_context import Report
from envbuild_smoke.results import CaseLine, Failure, Status, Step
from envbuild_smoke.run.failure import failure_of
from envbuild_smoke.run.pool import RankPool
from envbuild_smoke.run.results import Emit
from envbuild_smoke.run.task_run import RankTask, TaskRun

# The fields of a Report that come once, and that a result has too.
_ONCE = ("observed", "reference", "gradients", "perturbed", "weights")


class CaseRun:
    """A case while it runs; call `update` after every wait, until it returns True, then take `result`."""

    def __init__(self, task: RankTask, pool: RankPool, devices: tuple[int, ...], emit: Emit, now: float) -> None:
        # Files of an interrupted run would be taken for this one's.
        for folder in (task.folder, task.out / "checkpoints" / task.case.id):
            shutil.rmtree(folder, ignore_errors=True)
        self.weights_saved = False
        self.task_run = TaskRun(task, pool, devices, now)
        self._case: Case = task.case
        self._repeat = task.repeat
        self._emit = emit
        self._steps: list[Step] = []
        self._startup: float | None = None
        self._compute_seconds: dict[int, tuple[float, ...]] = {}
        self._once = Report(monotonic_seconds=now)

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
        task, run = self.task_run.task, self.task_run
        once, observed = self._once, self._once.observed
        if observed is not None:
            # Those of all ranks: what one of them opened or imported late is not in the report of the driver.
            unlisted = tuple(listed.findings(run.imported))
            observed = replace(observed, libraries=run.libraries, unlisted=unlisted)
        return CaseLine(
            case=self._case.id,
            repeat=self._repeat,
            status=status,
            steps=tuple(self._steps),
            seconds=round(run.ended_at - run.began, 3),
            startup_seconds=self._startup,
            started_seconds=round(started_seconds, 3),
            devices=device_ids,
            nodes=tuple(dict.fromkeys(process.node for process in run.processes)),
            fresh_processes=run.fresh,
            weights=once.weights,
            observed=observed,
            reference=once.reference,
            gradients=once.gradients,
            perturbed=once.perturbed,
            failure=cause,
            compute_seconds=tuple(self._compute_seconds[rank] for rank in sorted(self._compute_seconds)),
            logs=tuple(task.log_name(rank) for rank, log in enumerate(task.logs) if log.exists()),
        )

    def _read_reports(self) -> None:
        """Read what was reported since the last update, and emit its events."""
        about = {"case": self._case.id, "repeat": self._repeat}
        for rank, report in self.task_run.new_reports():
            once = {name: value for name in _ONCE if (value := getattr(report, name)) is not None}
            self._once = replace(self._once, **once)
            if report.compute_seconds is not None:
                self._compute_seconds[rank] = report.compute_seconds
            if report.weights_saved:
                self.weights_saved = True
            if step := report.step:
                if not self._steps:
                    # Steps are reported at their end.
                    self._startup = round(report.monotonic_seconds - step.seconds - self.task_run.began, 3)
                self._steps.append(step)
                numbers = {"step": step.step, "loss": step.loss, "grad_norm": step.grad_norm}
                self._emit({"event": "step", **about, **numbers})

    def _status(self) -> tuple[Status, Failure | None]:
        """Return how the case ended and, unless it completed, why."""
        timed_out = self.task_run.timed_out_at is not None
        cause = failure_of(self.task_run, f"{len(self._steps)} of {self._case.training.steps} steps")
        if cause is not None:
            return ("timed-out" if cause.kind == "timeout" and timed_out else "failed"), cause
        if problem := next((process.problem for process in self.task_run.processes if process.problem), None):
            # A report that is not of its type fails its case, and not the run.
            return "failed", Failure(kind="incomplete", message=problem)
        problem = self._step_problem()
        if problem is not None:
            # The last rank is of the last pipeline stage, which reports.
            log = self.task_run.task.log_name(self._case.world_size - 1)
            return "failed", Failure(kind="incomplete", message=problem, exit_status=0, log=log)
        return "completed", None

    def _step_problem(self) -> str | None:
        """Return which steps are missing or repeated; None if all were reported once."""
        numbers = [step.step for step in self._steps]
        last = self._case.training.steps
        if numbers == list(range(1, last + 1)):
            return None
        return f"every rank was done, but the steps reported are {numbers}, not 1 to {last}"
