"""The results of a run: `results.jsonl`, one JSON object a line, each on disk before the next thing starts.

A run that is killed leaves the lines of the cases that had ended. A whole run ends with a line of type
"end".
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

SCHEMA = "envbuild.results/2"
FILE_NAME = "results.jsonl"

# Called with each progress event.
Emit = Callable[[dict[str, Any]], None]
Status = Literal["completed", "failed", "timed-out", "not-run"]
FailureKind = Literal["exception", "exit", "signal", "timeout", "baseline-missing", "incomplete", "not-finite"]


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
    """What happened to one case, the `repeat`th time; on `devices`, `started_seconds` after the run began.

    `startup_seconds` passed until its first step began, None if none did. `fresh_processes` counts the rank
    processes that did not live before. `observed` is what the driver read from what it had built, `weights`
    how the final weights differ from the baseline's, `reference` how a baseline compares with the reference,
    `gradients` a norm and projections of each gradient of the first step, `perturbed` a baseline's trainings
    with moved weights.
    `restarted` is why it was started a second time, through no fault of its ranks; all else is about the second time
    then.
    """

    case: str
    status: Status
    repeat: int = 1
    steps: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0
    startup_seconds: float | None = None
    started_seconds: float = 0.0
    devices: tuple[int, ...] = ()
    fresh_processes: int = 0
    weights: dict[str, Any] | None = None
    observed: dict[str, Any] | None = None
    reference: dict[str, Any] | None = None
    gradients: list[dict[str, Any]] | None = None
    perturbed: list[dict[str, Any]] | None = None
    failure: Failure | None = None
    logs: tuple[str, ...] = ()
    restarted: str | None = None

    def as_line(self) -> dict[str, Any]:
        """Return the line of the results file."""
        startup = None if self.startup_seconds is None else round(self.startup_seconds, 3)
        rounded = {
            "seconds": round(self.seconds, 3),
            "startup_seconds": startup,
            "started_seconds": round(self.started_seconds, 3),
        }
        return {"schema": SCHEMA, "type": "case", **asdict(self), **rounded}


def result_from(line: Mapping[str, Any]) -> CaseResult:
    """Return the result that `as_line` made this line of."""
    values = {name: line[name] for name in (field.name for field in fields(CaseResult)) if name in line}
    for name in ("steps", "devices", "logs"):
        values[name] = tuple(values[name])
    if values["failure"] is not None:
        values["failure"] = Failure(**values["failure"])
    return CaseResult(**values)


class ResultsWriter:
    """Appends lines to the `results.jsonl` of an output directory.

    It must not have one yet, unless the first `kept_bytes` of it are continued: whole lines.
    """

    def __init__(self, out: Path, kept_bytes: int | None = None) -> None:
        # "x": results that are already there are evidence, and never overwritten.
        self._file = (out / FILE_NAME).open("x" if kept_bytes is None else "a", encoding="utf-8")
        if kept_bytes is not None:
            self._file.truncate(kept_bytes)
        # The file's name, too, has to survive a crash of the machine.
        directory = os.open(out, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def write(self, line: dict[str, Any]) -> None:
        """Append one object and wait until it is on disk."""
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        # A machine that loses power right after a case must not lose its result.
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def now() -> str:
    """Return the time as "2026-11-21T02:00:00Z"."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
