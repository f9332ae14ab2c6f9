"""API drift: finds, by reading sources alone, what one component asks of another that its locked version lacks."""

from envbuild.lock.drift.check import find_drift
from envbuild.lock.drift.findings import Finding, FindingKind, Moment, Severity, read_finding
from envbuild.lock.drift.sources import SourceTree

__all__ = ["Finding", "FindingKind", "Moment", "Severity", "SourceTree", "find_drift", "read_finding"]
