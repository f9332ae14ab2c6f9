"""One task from start to end: its rank processes get it, are watched, and, if need be, killed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

from envbuild_smoke.environment.libraries import merged
from envbuild_smoke.plan.models import Case
from envbuild_smoke.rank_context import Report
from envbuild_smoke.ranks.ipc import Done, RankCommand
from envbuild_smoke.run.pool import DEATH_LIMIT_SECONDS, RankPool

# After one rank failed, its peers get this long to fail by themselves and write why to their logs.
GRACE_SECONDS = 3.0
# Ranks that exceeded their time limit get this long to write their stacks.
STACKS_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """What a group of ranks has to do.

    `part` counts those of the case from 0. `root` is the run's output directory and `out` this repeat's, in it; `sizes`
    are the sweep's. A `fresh` task gets processes of its own, whatever the isolation.
    """

    kind: Literal["case", "bandwidth"]
    case: Case
    repeat: int
    root: Path
    world_size: int
    limit_seconds: float
    part: int = 0
    sizes: tuple[int, ...] = ()
    fresh: bool = False

    @property
    def out(self) -> Path:
        """The output directory as the ranks see it: every repeat after the first has one of its own."""
        return repeat_folder(self.root, self.repeat)

    @property
    def folder(self) -> Path:
        """Where logs and reports go."""
        return self.out / "cases" / self.case.id

    @property
    def logs(self) -> tuple[Path, ...]:
        """The log of each rank."""
        return tuple(self.root / self.log_name(rank) for rank in range(self.world_size))

    def log_name(self, rank: int) -> str:
        """Return the name of a rank's log as results have it."""
        return str((self.folder / f"rank{rank}.log").relative_to(self.root))


def repeat_folder(root: Path, repeat: int) -> Path:
    """Return the output directory of a repeat, counted from 1."""
    return root if repeat == 1 else root / f"repeat-{repeat}"


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank process ended, and when that was seen (monotonic seconds).

    `exit_status` is negative for a signal, None if not reported. `done` is true when its task was done by then.
    """

    rank: int
    exit_status: int | None
    seen_at: float
    killed_by_runner: bool = False
    done: bool = False


class _State(Enum):
    RUNNING = 1
    WRITING_STACKS = 2
    DYING = 3
    ENDED = 4


class TaskRun:
    """A task that runs; call `update` after every wait, until it returns True."""

    def __init__(self, task: RankTask, pool: RankPool, devices: tuple[int, ...], now: float) -> None:
        task.folder.mkdir(parents=True, exist_ok=True)
        self.task = task
        self.devices = devices
        self.began = now
        self.ended_at = now
        self.timed_out_at: float | None = None
        self.ends: dict[int, RankEnd] = {}
        self._pool = pool
        self._state = _State.RUNNING
        self._changed_at = now
        self._failed_at: float | None = None
        self._killed_at = float("inf")
        self.processes = pool.acquire(devices, task.logs, fresh=task.fresh)
        self._send()

    @property
    def fresh(self) -> int:
        """How many of its processes had run nothing before."""
        return sum(process.began_fresh for process in self.processes)

    @property
    def done(self) -> list[Done]:
        """What the ranks that are done answered, in their order."""
        return [process.done for process in self.processes if process.done]

    @property
    def libraries(self) -> dict[str, tuple[str, ...]]:
        """The files of single libraries that any rank had mapped when it was done."""
        return merged(done.libraries for done in self.done)

    @property
    def imported(self) -> dict[str, str]:
        """The files of what its ranks imported that had not been imported before, by module."""
        return {module: file for done in self.done for module, file in done.imported.items()}

    @property
    def hanging(self) -> list[int]:
        """The ranks that were not done, and had not ended, when the time was over."""
        limit = self.timed_out_at or float("inf")
        ended = {rank for rank, end in self.ends.items() if end.seen_at <= limit}
        return [rank for rank, process in enumerate(self.processes) if not process.done and rank not in ended]

    @property
    def lost_its_server(self) -> bool:
        """True when the fork server died before all ranks were done."""
        return any(process.lost and not process.done for process in self.processes)

    @property
    def lost_node(self) -> str:
        """Why a node is lost that had ranks which were not done; "" if none is."""
        return next((process.lost_node for process in self.processes if process.lost_node and not process.done), "")

    def new_reports(self) -> Iterator[tuple[int, Report]]:
        """Give what its ranks reported since the last call, each with the rank."""
        for rank, process in enumerate(self.processes):
            while process.reports:
                yield rank, process.reports.popleft()

    def update(self, now: float) -> bool:
        """Note which ranks were done or ended, kill those that have to end, and return whether the task has ended."""
        self._note_ends()
        if self._state is _State.RUNNING:
            self._check_running(now)
        if self._state is _State.WRITING_STACKS and now > self._changed_at + STACKS_SECONDS:
            self.kill(now)
        if self._state is _State.DYING:
            # Also one whose start was reported only after the first kill.
            self._pool.retire(process for process in self.processes if not process.gone)
            # A process in uninterruptible sleep (a disk, a driver) outlives SIGKILL: the run goes on without it.
            if all(process.gone for process in self.processes) or now > self._changed_at + DEATH_LIMIT_SECONDS:
                self._end(now)
        return self._state is _State.ENDED

    def kill(self, now: float) -> None:
        """End its ranks now."""
        self._killed_at = min(self._killed_at, now)
        self._state, self._changed_at = _State.DYING, now
        self._pool.retire(self.processes)

    def _send(self) -> None:
        task, size = self.task, str(self.task.world_size)
        places = [self._pool.place(device) for device in self.devices]
        ranks_on = Counter(node for node, _ in places)
        # Bound before any rank gets its number, and passed to rank 0: no other process can have it in between.
        meeting = self._pool.bind(self.processes[0])
        seen: Counter[int] = Counter()
        for rank, (process, log, (node, device)) in enumerate(zip(self.processes, task.logs, places, strict=True)):
            # On the CPU devices are slots of the scheduler: LOCAL_RANK is the rank among those of its node.
            local = device if self._pool.plan.device == "cuda" else seen[node]
            seen[node] += 1
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": size,
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(ranks_on[node]),
                "MASTER_ADDR": meeting.host,
                "MASTER_PORT": str(meeting.port),
            }
            command = RankCommand(
                task=task.kind,
                case=task.case.id,
                repeat=task.repeat,
                part=task.part,
                rank=rank,
                world_size=task.world_size,
                host=meeting.host,
                port=meeting.port,
                device_index=local,
                listens=rank == 0,
                out=str(task.out),
                log=str(log),
                sizes=task.sizes,
                variables=variables,
            )
            self._pool.send(process, command, meeting)

    def _note_ends(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank in self.ends or process.exited_at is None or process.exit_status is None:
                continue
            status, moment = process.exit_status, process.exited_at
            # The kernel kills with signal 9 too, when memory runs out: before the runner's own kill it is a cause.
            killed = status == -9 and moment > self._killed_at
            self.ends[rank] = RankEnd(
                rank=rank, exit_status=status, seen_at=moment, killed_by_runner=killed, done=process.done is not None
            )

    def _check_running(self, now: float) -> None:
        if all(process.done for process in self.processes):
            self._pool.release(self.processes)
            self._end(now)
            return
        broken = [process for process in self.processes if process.gone and not process.done]
        if broken:
            self._failed_at = self._failed_at or now
            if all(process.gone or process.done for process in self.processes) or (
                now > self._failed_at + GRACE_SECONDS
            ):
                self.kill(now)
        elif now > self.began + self.task.limit_seconds:
            self.timed_out_at = now
            for process in self.processes:
                if not process.gone and not process.done:
                    self._pool.request_stacks(process)
            # Not killed at once: faulthandler writes the stacks, which say where the rank hung.
            self._state, self._changed_at = _State.WRITING_STACKS, now

    def _end(self, now: float) -> None:
        self._state, self.ended_at = _State.ENDED, now
