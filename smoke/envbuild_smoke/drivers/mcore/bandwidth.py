"""How fast all_reduce, all_gather and all_to_all are on the devices given, and over which transports."""

import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from envbuild_smoke.drivers.mcore.processes import joined
from envbuild_smoke.drivers.nccl_log import MOST_LINES, network_lines_in, transports_in
from envbuild_smoke.rank_context import RankContext, nccl_log_of
from envbuild_smoke.results import BandwidthLine, Point

# NCCL connects its channels in the first calls, which would be counted as transfer.
WARM_UPS = 5
ITERATIONS = 20
# A slow network is found to be slow by a few: 4 GiB take 2 s over sockets, and longer over a bad link.
LEAST_ITERATIONS = 2
ENOUGH_SECONDS = 5.0


def measure_bandwidth(context: RankContext, sizes_bytes: Iterable[int]) -> BandwidthLine:
    """Time each collective with each size over all ranks; every rank calls this, each gets what rank 0 measured.

    A point's time is the median of up to `ITERATIONS`, each as slow as its slowest rank. Bus bandwidth is NCCL-tests'
    figure: what a ring moves over each link, whatever the number of ranks n. It is 2 (n - 1) / n bytes for each byte
    that all_reduce is given, and (n - 1) / n for each byte that all_gather gives (doc/PERFORMANCE.md there) or that
    all_to_all takes from a rank (src/alltoall.cu, AlltoAllGetBw).
    NCCL reads where to write its log once in a process: on GPUs the ranks have to be fresh ones.
    """
    log = nccl_log_of(context.out / "cases" / context.case.id, context.rank)
    # NCCL prints the "via" lines under INIT, P2P, NET and SHM, and what variables say under ENV. A file for each rank:
    # lines of several would mix in one. They stay set: the sweep is the last task of its processes.
    subsystems = "INIT,ENV,GRAPH,P2P,NET,SHM"
    os.environ.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": subsystems, "NCCL_DEBUG_FILE": str(log)})
    with joined(context) as device:
        backend = torch.distributed.get_backend()
        sizes = tuple(sizes_bytes)
        points = [
            tuple(measure(context.world_size, size, device) for size in sizes)
            for measure in (_all_reduce, _all_gather, _all_to_all)
        ]
        written = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        logged: list[Any] = [None] * context.world_size
        torch.distributed.all_gather_object(logged, (transports_in(written), network_lines_in(written)))
        # Rank 0's clock counts for all.
        torch.distributed.broadcast_object_list(points, src=0)
    # Of all ranks: each logs its own connections alone, and one that fell back to sockets is what is looked for.
    names = {name for transports, _ in logged for name in transports}
    lines = dict.fromkeys(line for _, lines in logged for line in lines)
    return BandwidthLine(
        ranks=context.world_size,
        backend=backend,
        transports=tuple(sorted(names)) or None,
        points=points[0],
        all_gather=points[1],
        all_to_all=points[2],
        network_log=tuple(lines)[:MOST_LINES],
    )


def _all_reduce(ranks: int, size: int, device: torch.device) -> Point:
    """Time all_reduce of `size` bytes of float32."""
    message = torch.ones(max(size // 4, 1), dtype=torch.float32, device=device)

    def reduce() -> None:
        torch.distributed.all_reduce(message)

    # Sums of sums would soon be infinite.
    seconds = _seconds(reduce, lambda: message.fill_(1.0), device)
    return _point(message, seconds, 2 * (ranks - 1) / ranks)


def _all_gather(ranks: int, size: int, device: torch.device) -> Point:
    """Time all_gather of `size` bytes of float32, each rank's part of them together."""
    part = torch.ones(max(size // 4 // ranks, 1), dtype=torch.float32, device=device)
    whole = torch.empty(part.numel() * ranks, dtype=torch.float32, device=device)

    def gather() -> None:
        torch.distributed.all_gather_into_tensor(whole, part)

    return _point(whole, _seconds(gather, lambda: None, device), (ranks - 1) / ranks)


def _all_to_all(ranks: int, size: int, device: torch.device) -> Point:
    """Time all_to_all of `size` bytes of float32 from each rank, an equal part for each other one."""
    parts = torch.ones(max(size // 4 // ranks, 1) * ranks, dtype=torch.float32, device=device)
    received = torch.empty_like(parts)

    def exchange() -> None:
        torch.distributed.all_to_all_single(received, parts)

    return _point(received, _seconds(exchange, lambda: None, device), (ranks - 1) / ranks)


def _seconds(collective: Callable[[], None], restore: Callable[[], object], device: torch.device) -> float:
    # The median: one slow iteration is no property of the link. Two runs on two H200s measured 243 and 268 GB/s at 64
    # MiB.
    times: list[float] = []
    spent, warm_ups = 0.0, WARM_UPS
    # All ranks have the same times, and end together.
    while len(times) < (ITERATIONS if spent < ENOUGH_SECONDS else LEAST_ITERATIONS):
        torch.distributed.barrier()
        _wait(device)
        began = time.perf_counter()
        collective()
        _wait(device)
        # A rank whose part is done early does not wait: the collective has ended when the last rank has it.
        seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64).to(device)
        torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
        spent += float(seconds)
        if warm_ups > 0 and (spent < ENOUGH_SECONDS or warm_ups == WARM_UPS):
            warm_ups -= 1
        else:
            times.append(float(seconds))
        restore()
    return statistics.median(times)


def _point(message: torch.Tensor, seconds: float, share: float) -> Point:
    moved = message.numel() * message.element_size()
    algorithm = moved / seconds / 1e9
    return Point(
        bytes=moved,
        seconds=seconds,
        algorithm_gigabytes_per_second=algorithm,
        bus_gigabytes_per_second=algorithm * share,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
