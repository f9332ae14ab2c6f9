"""API drift: finds, by reading sources alone, what one component asks of another that its locked version lacks."""

from envbuild.lock.drift.apart import Pair, find_drift_apart
from envbuild.lock.drift.check import find_drift
from envbuild.lock.drift.findings import Finding, FindingKind, Moment, Severity, read_finding
from envbuild.lock.drift.sources import SourceTree, write_wheel

__all__ = [
    "Finding",
    "FindingKind",
    "Moment",
    "Pair",
    "Severity",
    "SourceTree",
    "find_drift",
    "find_drift_apart",
    "read_finding",
    "write_wheel",
]
