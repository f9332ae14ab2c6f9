"""The results of a run: `results.jsonl`, one JSON object a line, each on disk before the next thing starts.

A run that is killed leaves the lines of the cases that had ended. A whole run ends with a line of type
"end".
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from envbuild_smoke.results import Line

FILE_NAME = "results.jsonl"

# Called with each progress event.
Emit = Callable[[Mapping[str, object]], None]


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

    def write(self, line: Line) -> None:
        """Append one object and wait until it is on disk."""
        self._file.write(json.dumps(asdict(line), allow_nan=False) + "\n")
        # A machine that loses power right after a case must not lose its result.
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def now() -> str:
    """Return the time as "2026-11-21T02:00:00Z"."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
