"""PATH without some programs."""

from __future__ import annotations

import os
from pathlib import Path


def path_without(folder: Path, *names: str) -> str:
    """PATH with the programs that are on it, but those named; links to the others lie in ``folder``."""
    found = []
    for number, place in enumerate(map(Path, os.environ["PATH"].split(":"))):
        if not any((place / name).exists() for name in names):
            found.append(place)
            continue
        found.append(folder / f"path-{number}")
        found[-1].mkdir(parents=True)
        for program in place.iterdir():
            if program.name not in names:
                (found[-1] / program.name).symlink_to(program)
    return ":".join(map(str, found))
