"""Decides which job starts next, and on which devices. Pure: no processes, no clock of its own.

Largest first: the job that needs most devices, and of those the longest, where the jobs that wait for it count with
it. Before them go urgent jobs, and jobs that the end of the whole run would wait for, the longest first. When the
first job does not fit on the free devices, later ones are started in its place (backfill), but only if, by their
estimates, they do not delay it: so no job waits for ever. A job without an estimate may delay it by most of the time
of one job: otherwise, where nothing is known, devices would stay free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# What a case without an estimate is taken to last where no case has one: on a GPU, mostly its start.
UNKNOWN_SECONDS = 15.0
# A job is pressing when it, and what waits for it, takes more than this share of what is left to be done.
# Half of what is left for each device: benchmarks/bench_packing.py holds the makespans with it.
_PRESSING = 0.5
# By how much of its own time a job without an estimate may delay a larger one. With none, bench_packing.py has 1.13
# times the best order for 4 H100s' cases on 12 devices; with all of it, 1.28 on 3 and on 6; so at most 1.09.
_DELAY = 0.75


@dataclass(frozen=True, kw_only=True)
class Job:
    """Something that runs on `world_size` devices for about `seconds` (None: unknown).

    It waits until the job `weights_of` has saved its weights, or has ended, and until the jobs `after` ended. One
    that is `urgent` then goes before all others.
    """

    key: str
    world_size: int
    seconds: float | None = None
    weights_of: str | None = None
    after: tuple[str, ...] = ()
    urgent: bool = False


@dataclass(frozen=True, kw_only=True)
class Start:
    """A job to be started now on these devices; by its estimate it ends at the moment `until`."""

    job: Job
    devices: tuple[int, ...]
    until: float


class Scheduler:
    """The jobs that wait and the devices that are free.

    Report what happens with `weights_saved`, `ended`, `again` and `dropped`; `start` returns what to start.
    """

    def __init__(self, jobs: Sequence[Job], devices: Sequence[int]) -> None:
        self._free = sorted(devices)
        self._running: dict[str, Start] = {}
        self._saved: set[str] = set()
        self._ended: set[str] = set()
        # Without the urgent ones: comparisons are short and always known, and say nothing of cases that nobody knows.
        known = [job.seconds for job in jobs if job.seconds is not None and not job.urgent]
        self._unknown_seconds = median(known) if known else UNKNOWN_SECONDS
        self._device_count = len(devices)
        self._followers: dict[str, list[Job]] = {job.key: [] for job in jobs}
        for job in jobs:
            for key in {job.weights_of, *job.after} - {None}:
                self._followers[str(key)].append(job)
        self._chains = {job.key: self._chain(job) for job in jobs}
        self._waiting = sorted(jobs, key=self._size, reverse=True)

    @property
    def waiting(self) -> tuple[Job, ...]:
        """The jobs that were not started, the largest first."""
        return tuple(self._waiting)

    @property
    def done(self) -> bool:
        """True when nothing waits and nothing runs."""
        return not self._waiting and not self._running

    def weights_saved(self, key: str) -> None:
        """Job `key`, which runs, has saved the weights that others start from."""
        self._saved.add(key)

    def ended(self, key: str) -> None:
        """Job `key` ended; its devices are free."""
        self._take_off(key)
        self._ended.add(key)

    def again(self, key: str) -> None:
        """Job `key`, which ran, waits once more; what it had saved by then does not count."""
        job = self._take_off(key)
        self._saved.discard(key)
        self._waiting = sorted([*self._waiting, job], key=self._size, reverse=True)

    def dropped(self, key: str) -> None:
        """Job `key`, which waits, will not run; those that wait for it do not wait on."""
        self._waiting = [job for job in self._waiting if job.key != key]
        self._ended.add(key)

    def start(self, now: float) -> list[Start]:
        """Return what is to be started at the moment `now` (seconds); it counts as running from here on."""
        starts: list[Start] = []
        # When the largest job that does not fit now will fit, and how many devices will be left then.
        reserved: tuple[float, int] | None = None
        for job in self._in_order(now):
            if not self._free:
                break
            if job.world_size > len(self._free):
                reserved = reserved or self._reserve(job)
                continue
            allowed = 0.0 if job.seconds is not None else _DELAY * self._unknown_seconds
            if reserved is not None and now + self.seconds(job) > reserved[0] + allowed:
                if job.world_size > reserved[1]:
                    continue
                reserved = (reserved[0], reserved[1] - job.world_size)
            starts.append(self._place(job, now))
        return starts

    def seconds(self, job: Job) -> float:
        """Return the estimate for `job`; for one without, the median of the others'."""
        return self._unknown_seconds if job.seconds is None else job.seconds

    def _size(self, job: Job) -> tuple[int, float]:
        """Return what decides the order: devices, and the time of the job and, on one device, of all that follow."""
        # A baseline of one device and its dependents would else come last, after larger cases that wait for others.
        following = sum(other.world_size * self.seconds(other) for other in self._followers[job.key])
        return job.world_size, self.seconds(job) + following

    def _in_order(self, now: float) -> list[Job]:
        """Return the jobs that may run: those first that the end of all would wait for, then the largest."""
        left = sum(job.world_size * self.seconds(job) for job in self._waiting)
        left += sum(max(0.0, running.until - now) * running.job.world_size for running in self._running.values())
        share = _PRESSING * left / self._device_count
        ready = [job for job in self._waiting if self._may_run(job)]
        urgent = [job for job in ready if job.urgent]
        pressing = [job for job in ready if not job.urgent and self._chains[job.key] > share]
        others = [job for job in ready if not job.urgent and self._chains[job.key] <= share]
        return [*urgent, *sorted(pressing, key=lambda job: self._chains[job.key], reverse=True), *others]

    def _chain(self, job: Job) -> float:
        """Return how long a job and the longest chain of those that wait for its end, or its weights, take."""
        return self.seconds(job) + max(map(self._chain, self._followers[job.key]), default=0.0)

    def _may_run(self, job: Job) -> bool:
        weights = job.weights_of is None or job.weights_of in self._saved or job.weights_of in self._ended
        return weights and self._ended.issuperset(job.after)

    def _reserve(self, job: Job) -> tuple[float, int]:
        count = len(self._free)
        for running in sorted(self._running.values(), key=lambda running: running.until):
            count += len(running.devices)
            if count >= job.world_size:
                return running.until, count - job.world_size
        raise AssertionError("the devices of all jobs together are all devices")

    def _take_off(self, key: str) -> Job:
        """Free the devices of a job that ran, and return it."""
        running = self._running.pop(key)
        self._free = sorted([*self._free, *running.devices])
        return running.job

    def _place(self, job: Job, now: float) -> Start:
        devices = _near(self._free, job.world_size)
        self._free = [device for device in self._free if device not in devices]
        self._waiting.remove(job)
        start = Start(job=job, devices=devices, until=now + self.seconds(job))
        self._running[job.key] = start
        return start


def _near(free: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` free devices: neighbours that start at a multiple of `count`, else neighbours, else any.

    Neighbours share a switch where not all GPUs are equally near, and blocks that are aligned leave blocks free.
    """
    runs = [tuple(range(first, first + count)) for first in free if all(first + step in free for step in range(count))]
    aligned = [run for run in runs if run[0] % count == 0]
    return (aligned or runs or [tuple(free[:count])])[0]
