"""The tasks of a rank: the training of a case, the comparison of weights, the bandwidth sweep."""

import os
from typing import Any

from envbuild_smoke import cpu_shim, drivers
from envbuild_smoke.rank_context import RankContext


def case(context: RankContext) -> None:
    """Train the case with its driver."""
    print(f"rank {context.rank} of {context.case.world_size} of {context.case.id}, pid {os.getpid()}", flush=True)
    _driver(context).train(context)


def compare(context: RankContext) -> dict[str, Any]:
    """Compare the final weights of the case with its baseline's; one rank does this, after both ended."""
    answer: dict[str, Any] = _driver(context).compare_weights(context)
    return answer


def bandwidth(context: RankContext, sizes: list[int]) -> dict[str, Any]:
    """Measure all_reduce over all ranks for each size in bytes; return backend, transports and points."""
    answer: dict[str, Any] = _driver(context).measure_bandwidth(context, sizes)
    return answer


def _driver(context: RankContext) -> Any:
    if context.device == "cpu":
        cpu_shim.install()
    return drivers.module(context.case.driver)
