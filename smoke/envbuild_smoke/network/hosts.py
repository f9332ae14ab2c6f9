"""The hosts of a run's nodes. One that is resumed may go on on others, of which earlier sweeps say nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from envbuild_smoke.results import BandwidthLine, Line, NodeLine, ResumedLine, RunLine


@dataclass(frozen=True)
class MeasuredHosts:
    """The hosts that were measured last, or had the run last where none were, by node; and all sweeps of them."""

    hosts: Mapping[int, str] = field(default_factory=dict)
    sweeps: tuple[BandwidthLine, ...] = ()


def measured_hosts(lines: Iterable[Line]) -> MeasuredHosts:
    """Return the hosts of a run's results, and their sweeps."""
    measured = MeasuredHosts()
    here: dict[int, str] = {}
    for line in lines:
        if isinstance(line, RunLine | ResumedLine):
            here = {0: line.host}
        elif isinstance(line, NodeLine):
            here[line.node] = line.host
        elif isinstance(line, BandwidthLine):
            before = measured.sweeps if measured.hosts == here else ()
            measured = MeasuredHosts(dict(here), (*before, line))
    return measured if measured.sweeps else MeasuredHosts(here)
