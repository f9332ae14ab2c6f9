"""The bandwidth sweeps, after the cases: on each node, across pairs of nodes, and over ever more of them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from envbuild_smoke.drivers.nccl_log import network_lines_in, transports_in
from envbuild_smoke.network.limits import outcomes_of
from envbuild_smoke.network.rounds import Group, next_round
from envbuild_smoke.plan.json_reader import read_object
from envbuild_smoke.plan.models import BandwidthSweep
from envbuild_smoke.rank_context import nccl_log_of
from envbuild_smoke.ranks.rank_main import BANDWIDTH, sweep_case
from envbuild_smoke.results import BandwidthLine, Failure
from envbuild_smoke.run.context import (
    MARGIN_SECONDS,
    POLL_SECONDS,
    OutOfTimeError,
    RunContext,
    RunInterruptedError,
)
from envbuild_smoke.run.failure import failure_of
from envbuild_smoke.run.forkserver import ForkServerError
from envbuild_smoke.run.task_run import RankTask, TaskRun

# Far more than a sweep takes: at most 5 s for each collective and size, and a few of them.
LIMIT_SECONDS = 300.0
# What one takes that does not hang: most of it is starting NCCL.
USUAL_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class _Started:
    """A sweep under way, or why it could not start."""

    group: Group
    run: TaskRun | None
    failure: Failure | None = None


def measure_bandwidth(
    context: RunContext, wanted: BandwidthSweep, done: Sequence[BandwidthLine]
) -> Iterator[BandwidthLine]:
    """Run the sweeps that are not `done` yet, and give the line of each when its round has ended.

    Raises RunInterruptedError, and OutOfTimeError where no time is left for the next round.
    """
    lines = list(done)
    nodes = range(context.options.nodes)
    while groups := next_round(nodes, wanted.ranks, outcomes_of(context.plan, lines)):
        ends_at = context.options.ends_at
        if ends_at is not None and time.time() + USUAL_SECONDS + MARGIN_SECONDS > ends_at:
            raise OutOfTimeError("bandwidth sweeps")
        for line in _measure(context, wanted, groups):
            lines.append(line)
            yield line


def _measure(context: RunContext, wanted: BandwidthSweep, groups: Sequence[Group]) -> list[BandwidthLine]:
    """Run sweeps at the same time, each on nodes of its own."""
    started = [_start(context, wanted, group) for group in groups]
    running = [each.run for each in started if each.run is not None]
    while running:
        if context.stop.is_set():
            for run in running:
                run.kill(time.monotonic())
            raise RunInterruptedError
        context.pool.wait(POLL_SECONDS)
        running = [run for run in running if not run.update(time.monotonic())]
    return [_line(wanted, each) for each in started]


def _start(context: RunContext, wanted: BandwidthSweep, group: Group) -> _Started:
    ranks = wanted.ranks * len(group.nodes)
    # New processes: NCCL logs how its ranks are connected only as it starts.
    task = RankTask(
        kind=BANDWIDTH,
        case=sweep_case(context.plan, _name(group, context.options.nodes), ranks),
        repeat=1,
        root=context.out,
        world_size=ranks,
        limit_seconds=LIMIT_SECONDS,
        sizes=wanted.sizes_bytes,
        fresh=True,
    )
    devices = tuple(node * context.on_node + rank for node in group.nodes for rank in range(wanted.ranks))
    try:
        context.wait_for_fork_server()
        return _Started(group=group, run=TaskRun(task, context.pool, devices, time.monotonic()))
    except ForkServerError as error:
        return _Started(group=group, run=None, failure=Failure(kind="exit", message=str(error)))


def _name(group: Group, nodes: int) -> str:
    """Name the folder of a sweep; the first and last node say which it is."""
    if nodes == 1:
        return BANDWIDTH
    return "-".join([BANDWIDTH, group.sweep, *map(str, dict.fromkeys([group.nodes[0], group.nodes[-1]]))])


def _line(wanted: BandwidthSweep, started: _Started) -> BandwidthLine:
    group, run, failure = started.group, started.run, started.failure
    if run is not None:
        failure = failure_of(run, "the sweep")
    if run is None or failure is not None:
        ranks = wanted.ranks * len(group.nodes)
        log = _nccl_logs(run.task) if run is not None else ""
        line = BandwidthLine(
            ranks=ranks,
            transports=tuple(transports_in(log)) or None,
            network_log=tuple(network_lines_in(log)),
            failure=failure,
        )
    else:
        line = read_object(BandwidthLine, run.done[0].answer, "bandwidth")
    return replace(line, sweep=group.sweep, nodes=group.nodes)


def _nccl_logs(task: RankTask) -> str:
    """Return what NCCL had logged before a sweep failed, as far as it is here."""
    logs = (nccl_log_of(task.folder, rank) for rank in range(task.world_size))
    return "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs if log.is_file())
