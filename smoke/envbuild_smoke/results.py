"""The results of a run: `results.jsonl`, one JSON object a line, each on disk before the next thing starts.

A run that is killed leaves the lines of the cases that had ended. A whole run ends with a line of type
"end".
"""

import json
import os
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

SCHEMA = "envbuild.results/1"
FILE_NAME = "results.jsonl"

Status = Literal["completed", "failed", "timed-out", "not-run"]
FailureKind = Literal["exception", "exit", "signal", "timeout", "baseline-missing", "incomplete"]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a case did not complete: its earliest failing rank, or None where no single rank is to blame.

    `exit_status` is negative for a signal; `log` is relative to the output directory.
    """

    kind: FailureKind
    message: str
    rank: int | None = None
    exit_status: int | None = None
    log: str | None = None


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What happened to one case; `startup_seconds` until its first step began, None if none did."""

    case: str
    status: Status
    steps: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0
    startup_seconds: float | None = None
    failure: Failure | None = None
    logs: tuple[str, ...] = ()

    def as_line(self) -> dict[str, Any]:
        """Return the line of the results file."""
        startup = None if self.startup_seconds is None else round(self.startup_seconds, 3)
        rounded = {"seconds": round(self.seconds, 3), "startup_seconds": startup}
        return {"schema": SCHEMA, "type": "case", **asdict(self), **rounded}


class ResultsWriter:
    """Appends lines to the `results.jsonl` of an output directory, which must not have one yet."""

    def __init__(self, out: Path) -> None:
        # "x": results that are already there are evidence, and never overwritten.
        self._file = (out / FILE_NAME).open("x", encoding="utf-8")
        # The file's name, too, has to survive a crash of the machine.
        directory = os.open(out, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def write(self, line: dict[str, Any]) -> None:
        """Append one object and wait until it is on disk."""
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        # A machine that loses power right after a case must not lose what the case said.
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def now() -> str:
    """Return the time as "2026-11-21T02:00:00Z"."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
