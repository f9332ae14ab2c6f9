"""What can be wrong with a certification, each with the code of the check that found it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from envbuild.core.digests import Json

Check = Literal[
    "parity-loss",
    "parity-grad-norm",
    "parity-weights",
    "data-parallel-bits",
    "steps",
    "not-finite",
    "timeout",
    "rank-exception",
    "rank-signal",
    "rank-exit",
    "baseline",
    "not-reported",
    "observed",
    "environment",
    "bandwidth",
    "transport",
    "repeats",
]
CHECKS: tuple[str, ...] = get_args(Check)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why something did not pass: the check that found it, and what it found in words."""

    check: Check
    text: str

    def as_json(self) -> dict[str, Json]:
        return {"check": self.check, "text": self.text}

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"
