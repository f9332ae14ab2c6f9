"""The tasks of a rank: the training of a case with the comparison of its weights, the bandwidth sweep."""

import os
from typing import Any

from envbuild_smoke import cpu_shim, drivers
from envbuild_smoke.rank_context import RankContext
from envbuild_smoke.results import BandwidthLine


def case(context: RankContext) -> None:
    """Train the case with its driver; then rank 0 alone compares its final weights, where the plan says so."""
    print(f"rank {context.rank} of {context.world_size} of {context.case.id}, pid {os.getpid()}", flush=True)
    driver = _driver(context)
    driver.train(context)
    if context.case.compare_weights and context.is_last and context.rank == 0:
        context.report(weights=driver.compare_weights(context))


def bandwidth(context: RankContext, sizes: tuple[int, ...]) -> BandwidthLine:
    """Measure all_reduce and all_gather over all ranks, for each size in bytes."""
    line: BandwidthLine = _driver(context).measure_bandwidth(context, sizes)
    return line


def _driver(context: RankContext) -> Any:
    if context.device == "cpu":
        cpu_shim.install()
    return drivers.module(context.case.driver)
