"""The table of a run's network: for each sweep its nodes, what they communicated by, and how fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from envbuild.certify.certificate.statement import MeasuredBandwidth
from envbuild.certify.run.watcher import brief
from envbuild_smoke.plan.models import COLLECTIVES

# On the terminal; the report has all.
MOST_ROWS = 16


@dataclass(frozen=True)
class SweepRow:
    """A row; ``speeds`` are the best bus bandwidths in GB/s, by collective, of a sweep that did not fail."""

    where: str
    over: str
    speeds: Mapping[str, float]
    failure: str | None


def network_rows(sweeps: Sequence[MeasuredBandwidth], hosts: Mapping[int, str]) -> list[SweepRow]:
    """A row for each sweep, in their order."""
    return [
        SweepRow(_where(sweep, hosts), ", ".join(sweep.transports or (sweep.backend or "",)), sweep.best, sweep.failure)
        for sweep in sweeps
    ]


def network_lines(rows: Sequence[SweepRow]) -> Iterator[str]:
    """The rows for a terminal: where there are many, those that failed and the slowest."""
    shown = rows
    if len(rows) > MOST_ROWS:
        shown = sorted(rows, key=lambda row: (row.failure is None, row.speeds.get(COLLECTIVES[0], 0.0)))[:MOST_ROWS]
    for row in shown:
        speeds = ", ".join(f"{name} {speed:.3g}" for name, speed in row.speeds.items())
        yield f"{row.where}: {brief(row.failure) if row.failure else f'{row.over}, {speeds} GB/s'}"
    if len(rows) > len(shown):
        yield f"... and {len(rows) - len(shown)} faster; the report has all"


def _where(sweep: MeasuredBandwidth, hosts: Mapping[int, str]) -> str:
    names = [f"{node} ({hosts[node]})" if node in hosts else str(node) for node in sweep.nodes]
    if sweep.sweep == "ramp":
        return f"{len(names)} nodes"
    return f"{'node' if len(names) == 1 else 'nodes'} {' and '.join(names)}"
