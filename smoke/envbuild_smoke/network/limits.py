"""Where a sweep falls short of what its plan asks for. Pairs of nodes are chosen by it, and the judge decides by it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from envbuild_smoke.network.rounds import Group, Outcome
from envbuild_smoke.plan.models import COLLECTIVES, BandwidthSweep, Floors, Plan
from envbuild_smoke.results import BandwidthLine, Point

NCCL = "nccl"
# How plugins call themselves in NCCL's log, by the network that they are: "via NET/AWS Libfabric/0/GDRDMA/Shared"
# (aws/aws-ofi-nccl#715; newer: "Libfabric"), "via NET/IBext_v8/0/GDRDMA" (HPC-X, in NVIDIA's images),
# "GPUDirectTCPX_v7".
_PLUGINS: Mapping[str, str] = {
    r"IBext(_v\d+)?": "IB",
    r"(AWS )?Libfabric": "OFI",
    r"GPUDirectTCPX(_v\d+)?": "GPUDirectTCPX",
}


@dataclass(frozen=True)
class Shortfall:
    """What a sweep does not reach, by the check of the judge that it fails."""

    check: Literal["bandwidth", "transport"]
    text: str


def outcomes_of(plan: Plan, lines: Sequence[BandwidthLine]) -> list[Outcome]:
    """Return which sweeps are done, and whether each reached what the plan asks for."""
    return [Outcome(Group(line.sweep, line.nodes), not shortfalls(plan, line)) for line in lines]


def networks_in(transports: Sequence[str] | None) -> tuple[str, ...]:
    """Return the networks among the transports that NCCL named, as a cluster's file has them ("NET/IB"), sorted."""
    return tuple(sorted({_network(name) for name in transports or () if name.startswith("NET/")}))


def _network(transport: str) -> str:
    plugin = transport.split("/")[1]
    name = next((name for pattern, name in _PLUGINS.items() if re.fullmatch(pattern, plugin)), plugin)
    return f"NET/{name}"


def collectives_of(line: BandwidthLine) -> Mapping[str, Sequence[Point]]:
    """Return what was measured of each collective, by size."""
    return dict(zip(COLLECTIVES, (line.points, line.all_gather, line.all_to_all), strict=True))


def floors_of(planned: BandwidthSweep, line: BandwidthLine) -> Mapping[str, float]:
    """Return the least bus bandwidth in GB/s of each collective that has a floor."""
    if line.sweep != "node":
        return _given(planned.network_floors)
    floors = _given(planned.node_floors)
    if (least := planned.floor_gigabytes_per_second) is not None:
        # Both, since one says little of the other: on 2 A3 Mega nodes people report 185 to 190 GB/s for all_gather, and
        # 88 to 89 GB/s for all_reduce. A cluster may raise what the matrix asks for, not lower it.
        floors.update({name: max(least, floors.get(name, 0.0)) for name in ("all_reduce", "all_gather")})
    return floors


def _given(floors: Floors) -> dict[str, float]:
    return {name: floor for name, floor in vars(floors).items() if floor is not None}


def shortfalls(plan: Plan, line: BandwidthLine) -> list[Shortfall]:
    """Return where a sweep was not done whole, is slower than a floor, or ran over another network than the cluster's.

    Raises ValueError where the plan asks for no sweep.
    """
    planned = plan.bandwidth
    if planned is None:
        raise ValueError("the plan asks for no sweep")
    if line.failure is not None:
        slow = [f"measuring it failed: {line.failure.message}{f' ({line.failure.log})' if line.failure.log else ''}"]
    else:
        slow = _not_measured(planned, line) or _too_slow(planned, line)
    return [*(Shortfall("bandwidth", text) for text in slow), *_other_network(plan, line)]


def _not_measured(planned: BandwidthSweep, line: BandwidthLine) -> list[str]:
    """Return what is missing of the first collective that was not measured as planned."""
    ranks, sizes = planned.ranks * len(line.nodes), sorted(planned.sizes_bytes)
    for name, points in collectives_of(line).items():
        if line.ranks != ranks or not _are_sizes(sorted(point.bytes for point in points), sizes, ranks):
            measured = "other" if len(points) == len(sizes) and line.ranks == ranks else len(points)
            asked = f"the plan asks for {ranks} ranks and {len(sizes)} sizes"
            return [f"{asked}; {name} has {line.ranks} ranks and {measured} sizes"]
        if any(point.bus_gigabytes_per_second <= 0 for point in points):
            return [f"a measured bandwidth of {name} is not positive"]
    return []


def _too_slow(planned: BandwidthSweep, line: BandwidthLine) -> list[str]:
    collectives = collectives_of(line)
    best = {
        name: max(point.bus_gigabytes_per_second for point in collectives[name]) for name in floors_of(planned, line)
    }
    return [
        f"{name} of {line.ranks} ranks reaches {best[name]:.3g} GB/s, the floor is {floor:g}"
        for name, floor in floors_of(planned, line).items()
        if best[name] < floor
    ]


def _are_sizes(measured: Sequence[int], planned: Sequence[int], ranks: int) -> bool:
    """Return whether sizes are those of the plan; parts for each rank are whole numbers of float32."""
    return len(measured) == len(planned) and all(
        abs(size - wanted) <= 4 * ranks for size, wanted in zip(measured, planned, strict=True)
    )


def _other_network(plan: Plan, line: BandwidthLine) -> list[Shortfall]:
    """Where ranks of several nodes did not communicate by the cluster's network."""
    if plan.transport is None or line.sweep == "node":
        return []
    # Of a sweep that failed there may be no more than the beginning of NCCL's log.
    used = networks_in(line.transports) or ((line.backend,) if line.backend not in (None, NCCL) else ())
    if used == (plan.transport,) or (line.failure is not None and not used):
        return []
    text = f"ranks communicated by {' and '.join(map(str, used))}" if used else "NCCL's log names no network"
    return [Shortfall("transport", f"{text}; the cluster's file expects {plan.transport}")]
