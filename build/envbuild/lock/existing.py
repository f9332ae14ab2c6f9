"""The lock that is there: whether it is still what its inputs give, and what of it the next one takes over."""

from __future__ import annotations

import contextlib
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.core import locks
from envbuild.core.background import interruptible
from envbuild.core.digests import sha256_bytes, short
from envbuild.core.errors import CheckRefusedError
from envbuild.lock import lockfile
from envbuild.lock.context import RunContext
from envbuild.lock.inputs.pins import GIT_PREFIX
from envbuild.lock.inputs.request import LockInputs
from envbuild.lock.lockfile import LockDirectory, read_lock
from envbuild.lock.models import Lock


def only_writer(path: Path, context: Context) -> contextlib.AbstractContextManager[None]:
    """Be the only one who writes the lock directory ``path``."""
    return locks.exclusive(
        # In the store, since the lock directory itself is replaced as a whole; by the path's digest, since two projects
        # may have locks of one name.
        context.store.root / "locks" / f"lockfiles-{short(sha256_bytes(str(path.resolve()).encode()))}.lock",
        on_wait=lambda: context.reporter.note(f"another envbuild is writing {path}: waiting for it"),
    )


def existing_lock(path: Path, *, upgrade: bool) -> LockDirectory | None:
    """The existing lock; None without one, or for one that cannot be read and is going to be replaced.

    Raises:
        CheckRefusedError: it cannot be read, and is not going to be replaced.
    """
    if not (path / lockfile.RECORD_FILE).is_file():
        return None
    try:
        return read_lock(path)
    except CheckRefusedError:
        if upgrade:
            return None
        raise


def is_up_to_date(directory: LockDirectory, inputs: LockInputs, context: RunContext) -> bool:
    """Whether a lock is from these inputs, and no branch that it follows moved; reports which did."""
    if directory.lock.inputs.digest != inputs.digest:
        return False
    moved = moved_branches(directory.lock, context)
    if inputs.selection.stack.project is not None:
        from envbuild.lock.uv_project.tree import moved_project  # slow to import

        moved += filter(None, [moved_project(directory.lock, inputs.selection, context)])
    for line in moved:
        context.reporter.note(line)
    return not moved


def moved_branches(lock: Lock, context: RunContext) -> list[str]:
    """A line for each branch that the lock follows and that is at another commit now."""
    # Only a lock as of `now` follows its branches: as of a day a branch is where it was that day.
    followed = {
        name: (part.git, part.asked.removeprefix(GIT_PREFIX), part.commit)
        for name, part in lock.components.items()
        if part.git is not None and part.commit is not None and part.follows
    }
    if not followed:
        return []
    branches: dict[str, list[str]] = {}
    for url, branch, _ in followed.values():
        branches.setdefault(url, []).append(branch)
    with (
        context.reporter.step(f"ask where the branches of {', '.join(followed)} are"),
        interruptible(len(branches)) as pool,
    ):
        opened = [(context.repositories.open(url), names) for url, names in branches.items()]
        answers = pool.map(lambda asked: asked[0].tips(asked[1]), opened)
        tips = dict(zip(branches, answers, strict=True))
    moved = []
    for name, (url, branch, before) in followed.items():
        asked, now = lock.components[name].asked, tips[url].get(branch)
        if now is None:
            moved.append(f"{name}: branch {asked} is gone from {url}")
        elif now != before:
            moved.append(f"{name}: branch {asked} moved from {before[:12]} to {now[:12]}")
    return moved


def moved_inputs(inputs: LockInputs, existing: LockDirectory | None, context: RunContext) -> LockInputs:
    """The inputs of the lock that replaces an existing one; where only branches moved, its versions stay."""
    moved = inputs.moved_on(existing)
    if existing is None or not moved.stays:
        return moved
    from envbuild.lock.branches import pins_stay  # slow to import

    return moved.with_pins_of(existing.lock) if pins_stay(existing.lock, context.repositories) else moved
