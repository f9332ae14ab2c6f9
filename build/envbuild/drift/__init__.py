"""API drift: finds, by reading sources alone, what one component asks of another that its locked version lacks."""

from envbuild.drift.findings import Finding, FindingKind, Moment, Severity, Weight, read_finding
from envbuild.drift.sources import SourceTree, write_wheel
from envbuild.drift.worker import Comparison, Pair, find_drift_apart

__all__ = [
    "Comparison",
    "Finding",
    "FindingKind",
    "Moment",
    "Pair",
    "Severity",
    "SourceTree",
    "Weight",
    "find_drift_apart",
    "read_finding",
    "write_wheel",
]
