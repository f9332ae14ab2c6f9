"""How many compilers run at once, and how much memory they may take."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from envbuild.core.files import read_number

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the compilers of all packages share.

    Attributes:
        jobs: compilers at once.
        memory_gib: memory that they may take together, in whole GiB.
    """

    jobs: int
    memory_gib: int

    def share(self, job_memory_gib: float) -> int:
        """The GiB that one compiler counts for; at most all there are, so that one at a time always may run."""
        return max(1, min(self.memory_gib, math.ceil(job_memory_gib)))

    def jobs_for(self, job_memory_gib: float) -> int:
        """Compilers of one package at once, were it alone."""
        return max(1, min(self.jobs, self.memory_gib // self.share(job_memory_gib)))


def choose_limits(jobs: int | None = None, memory_gib: int | None = None) -> Limits:
    """The limits asked for; what was not asked for is as this machine allows."""
    cores, free = machine_limits()
    return Limits(jobs=jobs or cores, memory_gib=memory_gib or max(1, free // GIB))


def machine_limits(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Cores that this process may use, and memory in bytes that is free for it: proc(5), cgroup v2's memory.max."""
    # Kernels before 3.14 do not state it (proc(5)): then what one nvcc takes, 4 GiB.
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    free = int(match[1]) * 1024 if match else 2**32
    # "max" stands for no limit (cgroup v2); cgroup v1 has no such files.
    limit, used = read_number(cgroup / "memory.max"), read_number(cgroup / "memory.current")
    if limit is not None and used is not None:
        # In a container MemAvailable is the host's; the kernel ends compilers at the container's own limit.
        free = min(free, limit - used)
    return len(os.sched_getaffinity(0)), free
