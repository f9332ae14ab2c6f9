"""What a results file of the smoke runner holds so far: a run that was killed may have left half a line."""

from __future__ import annotations

import contextlib
from pathlib import Path

from envbuild.core import jsonread

RESULTS_FILE = "results.jsonl"


def lines_of(file: Path) -> list[dict[str, object]]:
    """Its lines, as far as they are JSON objects; none without the file."""
    lines = []
    with contextlib.suppress(OSError):
        # Half of a line may end in half of a character.
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                lines.append(jsonread.loads(line))
    return [line for line in lines if isinstance(line, dict)]


def is_whole(file: Path) -> bool:
    """Whether the run that wrote it came to its end."""
    return any(line.get("type") == "end" for line in lines_of(file))
