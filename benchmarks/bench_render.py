"""What rendering a job costs: scripts and environment definitions of the shipped clusters, against `bash -n`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from envbuild.catalog.catalog import Catalog
from envbuild.launch.slurm.job import SlurmJob
from envbuild.launch.slurm.render import render_edf, render_sbatch

REPEATS = 50
LIMIT_MILLISECONDS = 50.0


def milliseconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1000


def median(action: Callable[[], object]) -> float:
    return statistics.median(milliseconds(action) for _ in range(REPEATS))


def main() -> int:
    catalog, worst, text = Catalog.shipped(), 0.0, ""
    for name in catalog.names("clusters"):
        cluster = catalog.cluster(name)
        if cluster.slurm is None:
            continue
        job = SlurmJob(
            name="render", cluster=cluster, nodes=64, folder="/shared/run", image="/shared/image.sqsh", python="/python"
        )
        script, definition = median(partial(render_sbatch, job)), median(partial(render_edf, job))
        print(f"{name:<10} sbatch {script:6.2f} ms, edf {definition:6.2f} ms (medians of {REPEATS})")
        worst, text = max(worst, script, definition), render_sbatch(job)
    peer = median(partial(subprocess.run, ["bash", "-n"], input=text, text=True, check=True))
    print(f"bash -n    {peer:6.2f} ms")
    print(f"slowest / bash -n {worst / peer:.2f}; slowest {worst:.2f} ms (at most {LIMIT_MILLISECONDS:g})")
    return int(worst > LIMIT_MILLISECONDS)


if __name__ == "__main__":
    sys.exit(main())
