"""Runs a plan: starts the fork server, runs the cases, and writes the results file from its first line to its last."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from envbuild_smoke.drivers import MODULES as DRIVERS
from envbuild_smoke.environment import gpus
from envbuild_smoke.environment.findings import file_findings
from envbuild_smoke.environment.foreign_modules import ListedFiles
from envbuild_smoke.environment.imported import Ready
from envbuild_smoke.node_differences import node_differences
from envbuild_smoke.nodes.head import open_nodes
from envbuild_smoke.nodes.node import address_variables, run_node
from envbuild_smoke.nodes.node_pools import NodePools
from envbuild_smoke.plan.models import Case, Plan
from envbuild_smoke.ranks.program import RankProgram
from envbuild_smoke.results import CaseLine, EndLine, Gpu, NodeEnd, NodeLine, ResumedLine
from envbuild_smoke.run import resume
from envbuild_smoke.run.background import result_of
from envbuild_smoke.run.context import IMPORT_LIMIT_SECONDS, POLL_SECONDS, RunContext, RunInterruptedError
from envbuild_smoke.run.forkserver import ForkServerError
from envbuild_smoke.run.job_loop import JobLoop
from envbuild_smoke.run.jobs import make_jobs
from envbuild_smoke.run.options import Options, cache_variables
from envbuild_smoke.run.pool import Pool, RankPool
from envbuild_smoke.run.result_log import ResultLog
from envbuild_smoke.run.results import Emit, ResultsWriter, now
from envbuild_smoke.run.run_header import node_state, run_line
from envbuild_smoke.run.sweep import measure_bandwidth

# Until processes of an earlier start on a node that was out of reach have ended, or a network file system gives their
# locks up: the lease of NFS is 90 s (RFC 7530, section 9.5).
TAKEOVER_SECONDS = 100.0
# For the other nodes to end their ranks, and for nvidia-smi.
END_SECONDS = 60.0


class UnusableEnvironmentError(Exception):
    """The environment cannot run the plan at all: a library is missing, or torch sees too few GPUs."""


class DifferentNodesError(Exception):
    """A node is not as node 0: no case was started, and the results tell in what."""


def run_plan(
    plan: Plan, cases: tuple[Case, ...], out: Path, *, emit: Emit, stop: threading.Event, options: Options
) -> list[CaseLine]:
    """Run `cases` of `plan` into the directory `out`, which must not have results yet unless they are resumed.

    `emit` gets the progress events. Setting `stop` kills what runs and raises RunInterruptedError; the results of
    cases that had ended stay. Raises UnusableEnvironmentError or DifferentNodesError before the first case, or never,
    and ResumeError when the results in `out` are not of this run.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    drivers = tuple(sorted({DRIVERS[case.driver] for case in plan.cases}))
    program = options.program or RankProgram(preload=drivers)
    rank = options.node_rank
    # Before the results are read: another run could still write to them. Of several nodes each has its own ranks.
    lock = resume.lock_folder(
        out,
        f"{resume.LOCK}-node{rank}" if rank else resume.LOCK,
        TAKEOVER_SECONDS if options.token else resume.LOCK_SECONDS,
    )
    variables = {**options.variables, **(cache_variables(out) if plan.device == "cuda" else {})}
    pool: RankPool
    local = pool = Pool(program, plan, out, lock, variables, live=options.isolation == "live")
    on_node = _slots(plan, cases, options)
    try:
        if rank != 0:
            local.log_name = f"forkserver-node{rank}.log"
            run_node(local, options, on_node, emit, stop)
            return []
        previous = resume.read_previous(out, plan) if options.resume else None
        if options.nodes > 1:
            local.host = options.head[0]
            local.variables = {**variables, **address_variables(plan, local.host)}
            pool = open_nodes(local, options, on_node, emit, stop.is_set)
        context = RunContext(plan=plan, out=out, options=options, pool=pool, emit=emit, stop=stop, on_node=on_node)
        return _run(context, cases, previous)
    finally:
        pool.close()
        os.close(lock)


def _run(context: RunContext, cases: tuple[Case, ...], previous: resume.PreviousRun | None) -> list[CaseLine]:
    """Run the cases and write the results file."""
    plan = context.plan
    results = {} if previous is None else previous.cases
    wanted = [(case.id, repeat) for case in cases for repeat in plan.runs_of(case)]
    if previous is not None and previous.ended and results.keys() >= set(wanted):
        return [results[run] for run in wanted]
    context.pool.start_server()
    # While the fork server imports; other nodes are answered.
    listed, files = result_of(
        lambda: (ListedFiles(plan.expected_versions, plan.provided_packages), file_findings(plan)),
        lambda: context.pool.wait(POLL_SECONDS),
    )
    devices = tuple(range(context.on_node * context.options.nodes))
    ready, unusable = _start(context)
    # It compares every module that was imported with the packages' files.
    state = result_of(
        lambda: node_state(context, ready, files, listed, unusable), lambda: context.pool.wait(POLL_SECONDS)
    )
    line = run_line(context, devices, state)
    nodes = _other_nodes(context) if unusable is None else []
    different = [f"node {node.node} ({node.host})" for node in nodes if [*node_differences(node, state)]]
    if previous is not None:
        resume.check_same_environment(previous, line)
        resume.check_checkpoints(plan, cases, context.out, results)
    # Only now: a run that was interrupted while it imported leaves no results file, not an empty one.
    # Of one that is resumed, the incomplete last line and the line of type "end" are cut off.
    writer = ResultsWriter(context.out, None if previous is None else previous.whole_bytes)
    log = ResultLog(context.emit, writer, results)
    try:
        if previous is None:
            writer.write(line)
        else:
            resumed = ResumedLine(at=now(), host=state.host, cut_bytes=previous.cut_bytes, gpu_states=state.gpu_states)
            writer.write(resumed)
            context.emit({"event": "resumed", "kept": len(log.results), "cut_bytes": previous.cut_bytes})
        for node in nodes:
            writer.write(node)
        if unusable is None and not different:
            JobLoop(context, make_jobs(plan, cases, results), devices, log, listed).run()
            # After the cases: a sweep at the same time would slow them down, and be slowed down.
            hosts = {0: state.host, **{node.node: node.host for node in nodes}}
            swept = previous.measured.sweeps if previous is not None and previous.measured.hosts == hosts else ()
            for sweep in measure_bandwidth(context, plan.bandwidth, swept) if plan.bandwidth is not None else ():
                writer.write(sweep)
                context.emit({"event": "bandwidth", **asdict(sweep)})
        completed = sum(result.status == "completed" for result in log.results.values())
        ends = _other_ends(context)
        # What is in use after the run is what others have, or what was left: not the memory of ranks that wait.
        context.pool.close()
        states = tuple(gpus.states(context.options.gpus))
        writer.write(
            EndLine(cases=len(log.results), completed=completed, finished_at=now(), gpu_states=states, nodes=ends)
        )
    finally:
        writer.close()
    if unusable is not None:
        raise UnusableEnvironmentError(unusable)
    if different:
        raise DifferentNodesError(", ".join(different))
    return [log.results[run] for run in wanted]


def _start(context: RunContext) -> tuple[Ready, str | None]:
    """Return what the fork server reports, and why the environment cannot run the plan, if it cannot."""
    try:
        ready = context.wait_for_fork_server()
    except ForkServerError as error:
        return Ready(), str(error)
    return ready, None if context.plan.device == "cpu" else unseen_gpus(context.options.gpus, ready)


def unseen_gpus(chosen: Sequence[Gpu], ready: Ready) -> str | None:
    """Return why the run cannot be where torch sees fewer GPUs than nvidia-smi lists."""
    seen = ready.cuda_devices
    if seen >= len(chosen):
        return None
    drivers, cuda = ", ".join(sorted({gpu.driver for gpu in chosen})), ready.versions["cuda"]
    return (
        f"nvidia-smi lists {len(chosen)} GPUs for this run; torch sees {seen}. Driver {drivers} may be too old for "
        f"torch's CUDA {cuda} (update it, or take a base with an older CUDA), or torch's build is not for these GPUs"
        + (f": {ready.cuda_error}" if ready.cuda_error else "")
    )


def _other_nodes(context: RunContext) -> list[NodeLine]:
    """Wait until the other nodes have reported what runs there, unless they are lost, and return that.

    Raises UnusableEnvironmentError where one does not.
    """
    pools = context.pool
    if not isinstance(pools, NodePools):
        return []
    limit = time.monotonic() + IMPORT_LIMIT_SECONDS
    while pools.silent and time.monotonic() < limit:
        if context.stop.is_set():
            raise RunInterruptedError
        pools.wait(POLL_SECONDS)
    if silent := pools.silent:
        raise UnusableEnvironmentError(
            f"node {', '.join(map(str, silent))} did not report what runs there within {IMPORT_LIMIT_SECONDS:g} s"
        )
    return pools.lines


def _other_ends(context: RunContext) -> tuple[NodeEnd, ...]:
    """Have the other nodes end their ranks, and return the states of the GPUs of those that answer in time."""
    pools = context.pool
    if not isinstance(pools, NodePools):
        return ()
    pools.ask_for_gpu_states()
    limit = time.monotonic() + END_SECONDS
    while not pools.all_ended and time.monotonic() < limit and not context.stop.is_set():
        pools.wait(POLL_SECONDS)
    return pools.ends


def _slots(plan: Plan, cases: Sequence[Case], options: Options) -> int:
    """Return how many devices each node has: the GPUs, or slots for processes on the CPU."""
    if plan.device == "cuda":
        return len(options.gpus)
    # Two small cases at a time fill the cores that one leaves idle while its ranks wait for each other.
    largest = max(case.slots_on_node for case in cases)
    ranks = plan.bandwidth.ranks if plan.bandwidth else 1
    return max(largest, ranks, len(os.sched_getaffinity(0)))
