"""Subordinate user and group IDs: what mmdebstrap needs to work as an ordinary user (subuid(5), subgid(5))."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from envbuild.core.errors import MachineError
from envbuild.core.process import find_tool

# One range of this size maps every ID of a distribution; usermod(8) gives new accounts as much, from here on.
RANGE = 65536
FIRST = 100000


def require(etc: Path = Path("/etc")) -> None:
    """Refuse to begin where mmdebstrap could not map IDs for this account.

    Raises:
        MachineError: the programs that map are missing, or the account has no IDs of its own.
    """
    find_tool("newuidmap", "uidmap")
    find_tool("newgidmap", "uidmap")
    try:
        # As mmdebstrap asks: by name, and in these files alone.
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise MachineError(
            f"user {os.getuid()} has no name, so no subordinate IDs either",
            why="The password database does not know the account; mmdebstrap maps IDs by its name.",
            fix="Run envbuild as an account of this machine, or as root.",
        ) from None
    options = {"subuid": "--add-subuids", "subgid": "--add-subgids"}
    ranges = {name: _ranges(etc / name) for name in options}
    if missing := [name for name in options if user not in {entry[0] for entry in ranges[name]}]:
        words = []
        for name in missing:
            # Behind all ranges of other accounts: who shares IDs can change the other's files.
            first = max([FIRST, *(start + count for _, start, count in ranges[name])])
            words += [options[name], f"{first}-{first + RANGE - 1}"]
        raise MachineError(
            f"account {user} has no subordinate IDs, which mmdebstrap needs as an ordinary user",
            why=f"There is no line of {user} in {' and '.join(str(etc / name) for name in missing)}.",
            fix=f"As root: usermod {' '.join(words)} {user}\nOr run envbuild as root.",
        )


def _ranges(file: Path) -> list[tuple[str, int, int]]:
    """Name, first ID and number of IDs of each line."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # mmdebstrap finds no entry then
    ranges = []
    for line in lines:
        match line.strip().split(":"):
            case [name, start, count] if start.isdigit() and count.isdigit():
                ranges.append((name, int(start), int(count)))
    return ranges
