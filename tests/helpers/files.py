"""Files that a test damages, and what shows that a command did nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest


def flip_a_byte(path: Path) -> None:
    """Change one byte in the middle of a file, in place."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def snapshot_of(*folders: Path) -> dict[Path, tuple[int, int]]:
    """Time and size of every file and link below some folders."""
    found = {path: path.lstat() for folder in folders for path in folder.rglob("*") if not path.is_dir()}
    return {path: (info.st_mtime_ns, info.st_size) for path, info in found.items() if path.suffix != ".lock"}


def record_programs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that are started from now on, but those that ask a program for its version."""
    started: list[list[str]] = []
    start = subprocess.Popen.__init__

    def record(self: Any, argv: Any, *more: Any, **options: Any) -> None:
        words = [str(word) for word in argv]
        if not any(word.lstrip("-") == "version" for word in words):
            started.append(words)
        start(self, argv, *more, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", record)
    return started
