"""Whether the processes that ranks wrote the numbers of are gone."""

from __future__ import annotations

import time
from pathlib import Path


def assert_gone(out: Path) -> None:
    """No process of any ``*.pid`` file under ``out/cases`` is left, 30 seconds from now at the latest."""
    # A rank that was killed in the act leaves an empty file.
    files = [file for file in out.glob("cases/*/*.pid") if file.read_text()]
    assert files
    limit = time.monotonic() + 300
    while any(is_alive(file.read_text()) for file in files) and time.monotonic() < limit:
        time.sleep(0.05)
    assert [file.name for file in files if is_alive(file.read_text())] == []


def is_alive(pid: str) -> bool:
    """Whether this process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    # A killed process whose parent never asks for it stays behind as a zombie.
    return state != "Z"
