"""How fast all_reduce and all_gather are on the devices given, and over which transports."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from envbuild_smoke.drivers.mcore.processes import joined
from envbuild_smoke.drivers.nccl_log import transports_in
from envbuild_smoke.rank_context import RankContext
from envbuild_smoke.results import BandwidthLine, Point

# NCCL connects its channels in the first calls, which would be counted as transfer.
WARM_UPS = 5
ITERATIONS = 20


def measure_bandwidth(context: RankContext, sizes_bytes: Iterable[int]) -> BandwidthLine:
    """Time both collectives with each size over all ranks; every rank calls this, each gets what rank 0 measured.

    A point's time is the median of `ITERATIONS`, each as slow as its slowest rank. Bus bandwidth is NCCL-tests' figure
    (doc/PERFORMANCE.md there): a ring moves 2 (n - 1) / n bytes over each link for each byte of the message, whatever
    the number of ranks n; to gather, half as many for each byte of the result.
    NCCL reads where to write its log once in a process: on GPUs the ranks have to be fresh ones.
    """
    with _nccl_log(context) as log, joined(context) as device:
        backend = torch.distributed.get_backend()
        sizes = tuple(sizes_bytes)
        reduced = tuple(_all_reduce(context.world_size, size, device) for size in sizes)
        gathered = tuple(_all_gather(context.world_size, size, device) for size in sizes)
        logged: list[Any] = [None] * context.world_size
        torch.distributed.all_gather_object(logged, _transports(log))
        # Rank 0's clock counts for all.
        shared = [reduced, gathered]
        torch.distributed.broadcast_object_list(shared, src=0)
    # Of all ranks: each logs its own connections alone, and one that fell back to sockets is what is looked for.
    transports = None if backend != "nccl" else tuple(sorted({name for names in logged for name in names}))
    return BandwidthLine(
        ranks=context.world_size, backend=backend, transports=transports, points=shared[0], all_gather=shared[1]
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


def _seconds(collective: Callable[[], None], restore: Callable[[], object], device: torch.device) -> float:
    # The median: one slow iteration is no property of the link. Two runs on two H200s measured 243 and 268 GB/s at 64
    # MiB.
    times = []
    for iteration in range(WARM_UPS + ITERATIONS):
        torch.distributed.barrier()
        _wait(device)
        began = time.perf_counter()
        collective()
        _wait(device)
        # A rank whose part is done early does not wait: the collective has ended when the last rank has it.
        seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64).to(device)
        torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
        if iteration >= WARM_UPS:
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


@contextmanager
def _nccl_log(context: RankContext) -> Iterator[Path]:
    """Have NCCL write down how it connects the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, f"nccl{context.rank}.log")
        # NCCL prints the "via" lines under INIT, P2P, NET and SHM. A file for each rank: lines of several would mix in
        # one.
        wanted = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,P2P,NET,SHM", "NCCL_DEBUG_FILE": str(log)}
        # They stay set: the sweep is the last task of its processes.
        os.environ.update(wanted)
        yield log


def _transports(log: Path) -> list[str]:
    return transports_in(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else []
