"""API drift: finds, by reading sources alone, what one component asks of another that its locked version lacks."""

from typing import TYPE_CHECKING

from envbuild.drift.findings import Finding, FindingKind, Moment, Severity, read_finding
from envbuild.drift.sources import SourceTree, write_wheel
from envbuild.drift.worker import Pair, find_drift_apart

if TYPE_CHECKING:
    from envbuild.drift.check import find_drift

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


def __getattr__(name: str) -> object:
    # The check itself runs in a process of its own: whoever only starts that one need not import it.
    if name == "find_drift":
        from envbuild.drift.check import find_drift

        return find_drift
    raise AttributeError(name)
