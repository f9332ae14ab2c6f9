"""Decides which job starts next, and on which devices. Pure: no processes and no clock.

The baselines that other jobs wait for go first, then the jobs that need most devices; among equals the order of the
plan holds. A job that does not fit on the free devices waits, and the next one that fits starts in its place.
benchmarks/bench_packing.py compares the resulting times with the best order's.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """Something that runs on `world_size` devices, in equal parts on these nodes, in the order of its ranks.

    It waits until the job `weights_of` has saved its weights, or has ended: that alone where it needs the final ones.
    """

    key: str
    world_size: int
    nodes: tuple[int, ...] = (0,)
    weights_of: str | None = None
    needs_final_weights: bool = False


@dataclass(frozen=True, kw_only=True)
class Start:
    """A job to be started now on these devices."""

    job: Job
    devices: tuple[int, ...]


class Scheduler:
    """The jobs that wait and the devices that are free: so many on each node, counted over the nodes.

    Report what happens with `weights_saved`, `ended`, `again` and `dropped`; `start` returns what to start.
    """

    def __init__(self, jobs: Sequence[Job], devices: Sequence[int], on_node: int | None = None) -> None:
        self._on_node = on_node or max(devices) + 1
        self._free = sorted(devices)
        self._lost: set[int] = set()
        self._running: dict[str, Start] = {}
        self._saved: set[str] = set()
        self._ended: set[str] = set()
        self._baselines = {job.weights_of for job in jobs}
        self._waiting = sorted(jobs, key=self._priority, reverse=True)

    @property
    def waiting(self) -> tuple[Job, ...]:
        """The jobs that were not started, in the order in which they are considered."""
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
        self._release(key)
        self._ended.add(key)

    def again(self, key: str) -> None:
        """Job `key`, which ran, waits once more; what it had saved by then does not count."""
        job = self._release(key)
        self._saved.discard(key)
        self._waiting = sorted([*self._waiting, job], key=self._priority, reverse=True)

    def dropped(self, key: str) -> None:
        """Job `key`, which waits, will not run; those that wait for it do not wait on."""
        self._waiting = [job for job in self._waiting if job.key != key]
        self._ended.add(key)

    def lost(self, node: int) -> None:
        """The devices of a node are gone; jobs that run there still end."""
        self._lost.add(node)
        self._free = [device for device in self._free if device // self._on_node != node]

    def start(self) -> list[Start]:
        """Return what is to be started now; it counts as running from here on."""
        starts = []
        for job in self.waiting:
            if self._weights_are_there(job) and (devices := self._devices(job)):
                self._free = [device for device in self._free if device not in devices]
                self._waiting.remove(job)
                self._running[job.key] = Start(job=job, devices=devices)
                starts.append(self._running[job.key])
        return starts

    def _priority(self, job: Job) -> tuple[bool, int]:
        return job.key in self._baselines, job.world_size

    def _weights_are_there(self, job: Job) -> bool:
        there = self._ended if job.needs_final_weights else self._saved | self._ended
        return job.weights_of is None or job.weights_of in there

    def _devices(self, job: Job) -> tuple[int, ...]:
        """Return the devices for a job, its ranks in the order of the nodes; none where it does not fit now."""
        each = job.world_size // len(job.nodes)
        free = [[device for device in self._free if device // self._on_node == node] for node in job.nodes]
        if any(len(devices) < each for devices in free):
            return ()
        return tuple(device for devices in free for device in _near(devices, each))

    def _release(self, key: str) -> Job:
        """Free the devices of a job that ran, and return it."""
        running = self._running.pop(key)
        there = [device for device in running.devices if device // self._on_node not in self._lost]
        self._free = sorted([*self._free, *there])
        return running.job


def _near(free: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` free devices: neighbours that start at a multiple of `count`, else neighbours, else any.

    Neighbours share a switch where not all GPUs are equally near, and blocks that are aligned leave blocks free.
    """
    runs = [tuple(range(first, first + count)) for first in free if all(first + step in free for step in range(count))]
    aligned = [run for run in runs if run[0] % count == 0]
    return (aligned or runs or [tuple(free[:count])])[0]
