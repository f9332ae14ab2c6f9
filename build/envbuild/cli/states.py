"""The state of a stack on a base for a target, as `envbuild list stacks` prints it."""

from __future__ import annotations

import json
from pathlib import Path

from envbuild.catalog.stack import Stack
from envbuild.core import tomlread
from envbuild.image.output import OUT_DIR, image_path
from envbuild.lock.lockdir import lock_path, shipped_lock
from envbuild.lock.lockfile import RECORD_FILE as LOCK_FILE
from envbuild.store.record import RECORD_FILE

BUILT, OTHER_LOCK = "built", "built from another lock"
LOCKED, NOT_LOCKED = "locked, never built", "not locked"


def states(project: Path, name: str, stack: Stack) -> dict[str, dict[str, str]]:
    """The state of each image of a stack, by target and base. What is damaged is as if it were not there."""
    return {
        entry.target: {base: _state(project, name, base, entry.target) for base in entry.bases}
        for entry in stack.builds
    }


def _state(project: Path, stack: str, base: str, target: str) -> str:
    """Built is what lies in ``out/`` here: of what was built elsewhere nothing is known."""
    locked = _lock_digest(lock_path(project, stack, base)) or _lock_digest(shipped_lock(stack, base))
    try:
        # Not through the models: a list of stacks must not fail for a record of an older version.
        record = json.loads((image_path(project / OUT_DIR, stack, base, target) / RECORD_FILE).read_bytes())
        built = str(record["lock_digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return LOCKED if locked else NOT_LOCKED
    return BUILT if built == locked else OTHER_LOCK


def _lock_digest(folder: Path | None) -> str:
    if folder is None:
        return ""
    try:
        return str(tomlread.loads((folder / LOCK_FILE).read_text(encoding="utf-8"))["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
