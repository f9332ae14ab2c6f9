"""A failure in one line."""

from __future__ import annotations

import re

from envbuild.core.errors import EnvbuildError, ResolutionError
from envbuild.lock.checks.findings import LockRefusedError
from envbuild.lock.search.clashes import clashes, in_plain_ranges
from envbuild.lock.uv.explanation import NO_SOLUTION

# The first reason of uv 0.13's explanation, which goes on for pages.
_BECAUSE = re.compile(r"Because (.{1,200}?)(?:,? we can conclude| and because|$)", re.IGNORECASE)
_NOT_BUILT = re.compile(r"error: (Failed to [^`]{1,40}`[^`]{1,200}`)")


def summary(error: EnvbuildError) -> str:
    """A failure in one line: what excludes each other, else the first thing that is wrong."""
    if isinstance(error, LockRefusedError):
        return error.findings[0].what.splitlines()[0]
    if isinstance(error, ResolutionError):
        if clash := next(iter(clashes(error.why)), None):
            kept, relaxed = clash.kept, clash.relaxed
            return (
                f"{error.what}: {relaxed.by} declares {relaxed.package}{relaxed.range}, {kept.by} "
                f"{kept.package}{kept.range}"
            )
        text = in_plain_ranges(" ".join(error.why.split()))
        # Of what is not built uv says, in a hint, because of what it was included.
        unbuilt = _NOT_BUILT.search(text) if NO_SOLUTION not in text else None
        if match := unbuilt or _BECAUSE.search(text):
            return f"{error.what}: {match[1]}"
    return error.what
