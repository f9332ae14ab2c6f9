"""The bandwidth sweep: all_reduce and all_gather over all ranks, after the cases."""

import time
from collections.abc import Sequence
from contextlib import suppress

from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.models import BandwidthSweep
from envbuild_smoke.ranks.rank_main import BANDWIDTH, sweep_case
from envbuild_smoke.results import BandwidthLine, Failure
from envbuild_smoke.run.context import POLL_SECONDS, RunContext, RunInterruptedError
from envbuild_smoke.run.failure import failure_of
from envbuild_smoke.run.forkserver import ForkServerError
from envbuild_smoke.run.task_run import RankTask, TaskRun

# Far more than the sweep takes: 25 times a size, and 4 GiB take a few seconds even over sockets (2 to 3 GB/s on four
# H200s).
LIMIT_SECONDS = 300.0


def measure_bandwidth(context: RunContext, wanted: BandwidthSweep, devices: Sequence[int]) -> BandwidthLine:
    """Run the sweep and return its line in the results."""
    # New processes: NCCL logs how its ranks are connected only as it starts.
    task = RankTask(
        kind=BANDWIDTH,
        case=sweep_case(context.plan, wanted.ranks),
        repeat=1,
        root=context.out,
        world_size=wanted.ranks,
        limit_seconds=LIMIT_SECONDS,
        sizes=wanted.sizes_bytes,
        fresh=True,
    )
    failure: Failure | None = Failure(kind="exit", message="the fork server cannot start")
    with suppress(ForkServerError):
        context.wait_for_fork_server()
        run = TaskRun(task, context.pool, tuple(devices[: wanted.ranks]), time.monotonic())
        while not run.update(time.monotonic()):
            if context.stop.is_set():
                run.kill(time.monotonic())
                raise RunInterruptedError
            context.pool.wait(POLL_SECONDS)
        failure = failure_of(run, "the sweep")
        if failure is None:
            return read_object(BandwidthLine, run.done[0].answer, "bandwidth")
    return BandwidthLine(ranks=wanted.ranks, failure=failure)
