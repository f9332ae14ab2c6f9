"""The tasks of a rank beside training: the comparison of weights, and the bandwidth sweep."""

from typing import Any

from envbuild_smoke import cpu_shim, drivers
from envbuild_smoke.rank import RankContext


def compare_weights(context: RankContext) -> dict[str, Any]:
    """Compare the final weights of the case with its baseline's; one rank does this, after both ended."""
    answer: dict[str, Any] = _driver(context).compare_weights(context)
    return answer


def measure_bandwidth(context: RankContext, sizes: list[int]) -> dict[str, Any]:
    """Measure all_reduce over all ranks for each size in bytes; return backend, transports and points."""
    answer: dict[str, Any] = _driver(context).measure_bandwidth(context, sizes)
    return answer


def _driver(context: RankContext) -> Any:
    if context.device == "cpu":
        cpu_shim.install()
    return drivers.module(context.case.driver)
