"""API drift: finds, by reading sources alone, what one component asks of another that its locked version lacks."""

from envbuild.drift.findings import Finding, Moment, Weight, read_finding
from envbuild.drift.sources import write_wheel
from envbuild.drift.worker import Comparison, Pair, find_drift_apart

__all__ = [
    "Comparison",
    "Finding",
    "Moment",
    "Pair",
    "Weight",
    "find_drift_apart",
    "read_finding",
    "write_wheel",
]
