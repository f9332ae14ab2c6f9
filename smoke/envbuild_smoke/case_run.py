"""One case from start to end: its ranks are forked, watched, and, if need be, killed."""

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envbuild_smoke import failure
from envbuild_smoke.failure import RankEnd
from envbuild_smoke.plan import Case, Plan
from envbuild_smoke.rank import failure_record_path, metrics_path
from envbuild_smoke.ranks import Template, kill_leftovers, signal_group, signal_rank
from envbuild_smoke.results import CaseResult, Failure, Status

# After one rank failed, its peers get this long to fail by themselves and say so in their logs.
GRACE_SECONDS = 3.0
# Ranks that ran out of time are asked for their stacks and get this long to write them.
STACKS_SECONDS = 0.5
# SIGKILL leaves a process no choice, but one that waits for a disk or a driver may not die at once.
DEATH_LIMIT_SECONDS = 30.0
POLL_SECONDS = 0.05

Emit = Callable[[dict[str, Any]], None]


class RunInterruptedError(Exception):
    """The run was told to stop (SIGINT, SIGTERM)."""


class CaseRun:
    """A case while it runs; `run` is to be called once.

    `template_gone` says afterwards whether the template process died under it.
    """

    def __init__(
        self, plan: Plan, case: Case, out: Path, template: Template, stop: threading.Event, emit: Emit
    ) -> None:
        self.template_gone = False
        self._plan = plan
        self._case = case
        self._out = out.resolve()
        self._template = template
        self._stop = stop
        self._emit = emit
        self._logs = tuple(f"cases/{case.id}/rank{rank}.log" for rank in range(case.world_size))
        self._pids: list[int] = []
        self._ends: dict[int, RankEnd] = {}
        self._steps: list[dict[str, Any]] = []
        self._metrics_read = 0
        self._killed_at = float("inf")

    def run(self) -> CaseResult:
        """Run the case to its end; raises RunInterruptedError, with no rank left, when the run is to stop."""
        (self._out / "cases" / self._case.id).mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        self._template.start_ranks(self._start_command())
        try:
            timed_out_at = self._watch(began)
        finally:
            self._end_ranks()
        self._read_steps()
        status, cause = self._judge(timed_out_at)
        startup = None
        if self._steps:
            first = self._steps[0]
            startup = first["monotonic_seconds"] - first["seconds"] - began
        shown = ("step", "loss", "grad_norm", "seconds")
        return CaseResult(
            case=self._case.id,
            status=status,
            steps=tuple({name: step[name] for name in shown} for step in self._steps),
            seconds=time.monotonic() - began,
            startup_seconds=startup,
            failure=cause,
            logs=tuple(log for log in self._logs if (self._out / log).exists()),
        )

    def _start_command(self) -> dict[str, Any]:
        size = str(self._case.world_size)
        common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        return {
            "case": self._case.id,
            "plan": self._plan.content.decode(),
            "out": str(self._out),
            "ranks": [
                {
                    "log": str(self._out / log),
                    "environment": {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                }
                for rank, log in enumerate(self._logs)
            ],
        }

    def _watch(self, began: float) -> float | None:
        """Wait for all ranks to end; return when the time limit was seen to be over, None if it did not come first."""
        deadline = began + self._case.time_limit_seconds
        failed_at: float | None = None
        while not self._all_ended():
            self._take_event()
            self._read_steps()
            if self._stop.is_set():
                raise RunInterruptedError
            moment = time.monotonic()
            if failed_at is None and any(end.exit_status != 0 for end in self._ends.values()):
                failed_at = moment
            if failed_at is not None:
                if moment > failed_at + GRACE_SECONDS:
                    return None
            elif moment > deadline:
                for rank, pid in enumerate(self._pids):
                    if rank not in self._ends:
                        # Not its group: helpers of libraries would die of the signal, and the rank of their death.
                        signal_rank(pid, signal.SIGUSR1)
                time.sleep(STACKS_SECONDS)
                return moment
        return None

    def _all_ended(self) -> bool:
        return self.template_gone or len(self._ends) == self._case.world_size

    def _take_event(self) -> None:
        event = self._template.next_event(POLL_SECONDS)
        if event is None:
            return
        if event["event"] == "gone":
            self.template_gone = True
        elif event["event"] == "started" and event["case"] == self._case.id:
            self._pids = event["pids"]
        elif event["event"] == "exit" and event["pid"] in self._pids:
            rank, status, moment = self._pids.index(event["pid"]), event["status"], event["monotonic_seconds"]
            killed = status == -signal.SIGKILL and moment > self._killed_at
            self._ends[rank] = RankEnd(rank=rank, exit_status=status, seen_at=moment, killed_by_runner=killed)

    def _end_ranks(self) -> None:
        """Kill what still runs, ranks and what they started, and wait until the ranks are gone."""
        limit = time.monotonic() + DEATH_LIMIT_SECONDS
        # Ranks that are only just being forked are known a moment later.
        while not self._pids and not self.template_gone and time.monotonic() < limit:
            self._take_event()
        self._killed_at = time.monotonic()
        for rank, pid in enumerate(self._pids):
            if rank in self._ends:
                kill_leftovers(pid)
            else:
                signal_group(pid, signal.SIGKILL)
        while not self._all_ended() and time.monotonic() < limit:
            self._take_event()

    def _read_steps(self) -> None:
        """Take over the steps reported since the last look, and pass them on."""
        try:
            with metrics_path(self._out, self._case.id).open("rb") as file:
                file.seek(self._metrics_read)
                content = file.read()
        except FileNotFoundError:
            return
        # The last line may still be in the writing.
        whole = content[: content.rfind(b"\n") + 1]
        self._metrics_read += len(whole)
        for line in whole.splitlines():
            step = json.loads(line)
            if "step" not in step:
                continue
            self._steps.append(step)
            shown = {name: step[name] for name in ("step", "loss", "grad_norm")}
            self._emit({"event": "step", "case": self._case.id, **shown})

    def _judge(self, timed_out_at: float | None) -> tuple[Status, Failure | None]:
        """Return how the case ended and, unless it completed, why."""
        until = float("inf") if timed_out_at is None else timed_out_at
        records = {}
        for rank in range(self._case.world_size):
            record = failure.read_record(failure_record_path(self._out, self._case.id, rank))
            # What a rank raises once its time was over says nothing about why it took so long.
            if record is not None and float(record["monotonic_seconds"]) <= until:
                records[rank] = record
        ends = [end for end in self._ends.values() if end.rank in records or end.seen_at <= until]
        cause = failure.earliest(ends, records, self._case.id)
        if cause is not None:
            return "failed", cause
        if timed_out_at is not None:
            return "timed-out", self._timeout(timed_out_at)
        if self.template_gone:
            message = "the process that ranks are forked from died, and they with it; see template.log"
            return "failed", Failure(kind="exit", message=message)
        problem = self._step_problem()
        if problem is not None:
            return "failed", Failure(kind="incomplete", message=problem, exit_status=0, log=self._logs[-1])
        return "completed", None

    def _timeout(self, timed_out_at: float) -> Failure:
        ended = {rank for rank, end in self._ends.items() if end.seen_at <= timed_out_at}
        hanging = [rank for rank in range(self._case.world_size) if rank not in ended]
        done = f"{len(self._steps)} of {self._case.training.steps} steps"
        message = (
            f"not done after {self._case.time_limit_seconds:g} s, with {done}; ranks still running: "
            f"{', '.join(map(str, hanging)) or 'none'}; where each hung is at the end of its log"
        )
        if not hanging:
            return Failure(kind="timeout", message=message)
        first = hanging[0]
        status = self._ends[first].exit_status if first in self._ends else None
        return Failure(kind="timeout", message=message, rank=first, exit_status=status, log=self._logs[first])

    def _step_problem(self) -> str | None:
        """Say which steps are missing or repeated; None if all are there."""
        numbers = [step["step"] for step in self._steps]
        last = self._case.training.steps
        if numbers == list(range(1, last + 1)):
            return None
        return f"every rank exited with 0, but the steps reported are {numbers}, not 1 to {last}"
