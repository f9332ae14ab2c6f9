"""One case from start to end: what its ranks report while they run, and its result."""

import shutil
from dataclasses import replace

from envbuild_smoke.environment.foreign_modules import ListedFiles
from envbuild_smoke.environment.libraries import merged
from envbuild_smoke.plan.axes import Part
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
    """A case while it runs; call `update` after every wait, until it returns True: a part of the case has ended.

    Where it `goes_on`, begin its next part; else take `result`. `devices` are as many on each of its nodes; a part has
    the first of them, on the first nodes.
    """

    def __init__(self, task: RankTask, pool: RankPool, devices: tuple[int, ...], emit: Emit, now: float) -> None:
        # Files of an interrupted run would be taken for this one's.
        for folder in (task.folder, task.out / "checkpoints" / task.case.id):
            shutil.rmtree(folder, ignore_errors=True)
        self.weights_saved = False
        self.began = now
        self.devices = devices
        self._case: Case = task.case
        self._pool = pool
        self.task_run = TaskRun(task, pool, self._devices_of(self._case.parts[task.part]), now)
        self._libraries: list[dict[str, tuple[str, ...]]] = []
        self._imported: dict[str, str] = {}
        self._fresh = 0
        self._repeat = task.repeat
        self._emit = emit
        self._steps: list[Step] = []
        self._startup: float | None = None
        self._compute_seconds: dict[int, tuple[float, ...]] = {}
        self._once = Report(monotonic_seconds=now)

    def update(self, now: float) -> bool:
        """Note what was reported and which ranks ended; True when this part of the case has ended."""
        run = self.task_run
        ended = run.update(now)
        self._read_reports()
        if ended:
            # Now: its processes may be those of the next part, and forget what they reported.
            self._libraries.append(run.libraries)
            self._imported.update(run.imported)
            self._fresh += run.fresh
        return ended

    @property
    def goes_on(self) -> bool:
        """Whether the part that has ended went well, and another one follows."""
        return self._part.until < self._case.training.steps and self._status()[0] == "completed"

    def begin_part(self, now: float) -> None:
        """Begin the next part. Raises ForkServerError when its ranks cannot be started."""
        number = self.task_run.task.part + 1
        part = self._case.parts[number]
        task = replace(self.task_run.task, part=number, world_size=part.layout.world_size)
        self.task_run = TaskRun(task, self._pool, self._devices_of(part), now)

    @property
    def _part(self) -> Part:
        return self._case.parts[self.task_run.task.part]

    def _devices_of(self, part: Part) -> tuple[int, ...]:
        on_node = self._case.slots_on_node
        first = range(0, part.nodes * on_node, on_node)
        return tuple(device for start in first for device in self.devices[start : start + part.ranks_on_node])

    def kill(self, now: float) -> None:
        """End its ranks now."""
        self.task_run.kill(now)

    def result(self, started_seconds: float, device_ids: tuple[int, ...], listed: ListedFiles) -> CaseLine:
        """Return its result; `device_ids` name its devices, and `listed` are the files that its ranks may import."""
        status, cause = self._status()
        task, run = self.task_run.task, self.task_run
        once, observed = self._once, self._once.observed
        if observed is not None:
            # Those of all ranks: what one of them opened or imported late is not in the report of the driver.
            unlisted = tuple(listed.findings(self._imported))
            observed = replace(observed, libraries=merged(self._libraries), unlisted=unlisted)
        return CaseLine(
            case=self._case.id,
            repeat=self._repeat,
            status=status,
            steps=tuple(self._steps),
            seconds=round(run.ended_at - self.began, 3),
            startup_seconds=self._startup,
            started_seconds=round(started_seconds, 3),
            devices=device_ids,
            nodes=tuple(dict.fromkeys(self._pool.place(device)[0] for device in self.devices)),
            fresh_processes=self._fresh,
            weights=once.weights,
            observed=observed,
            reference=once.reference,
            gradients=once.gradients,
            perturbed=once.perturbed,
            failure=cause,
            compute_seconds=tuple(self._compute_seconds[rank] for rank in sorted(self._compute_seconds)),
            logs=tuple(name for name in map(task.log_name, range(self._case.slots)) if (task.root / name).exists()),
        )

    def _read_reports(self) -> None:
        """Read what was reported since the last update, and emit its events."""
        about = {"case": self._case.id, "repeat": self._repeat}
        for rank, report in self.task_run.new_reports():
            once = {name: value for name in _ONCE if (value := getattr(report, name)) is not None}
            self._once = replace(self._once, **once)
            if report.compute_seconds is not None and self._part.after == 0:
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
            log = self.task_run.task.log_name(self.task_run.task.world_size - 1)
            return "failed", Failure(kind="incomplete", message=problem, exit_status=0, log=log)
        return "completed", None

    def _step_problem(self) -> str | None:
        """Return which steps are missing or repeated; None if all were reported once."""
        numbers = [step.step for step in self._steps]
        last = self._part.until
        if numbers == list(range(1, last + 1)):
            return None
        return f"every rank was done, but the steps reported are {numbers}, not 1 to {last}"
