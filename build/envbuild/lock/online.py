"""``envbuild lock --check --online``: whether an index still has what is locked, with the same hashes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envbuild.catalog.context import Context
from envbuild.core.errors import CheckRefusedError, ResolutionError
from envbuild.core.text import shown
from envbuild.lock.lockfile import read_lock
from envbuild.lock.record.export import Format, export_lock

_HASHED = ("main", "compile")


def refuse_gone(paths: Sequence[Path], context: Context) -> None:
    """Ask the index for every release of these locks, by version and hash.

    Raises:
        CheckRefusedError: a lock names a release or a file that is gone, or was replaced.
        NetworkError: the index cannot be reached.
    """
    problems = []
    for path in paths:
        lock = read_lock(path)
        phases = [phase for phase in _HASHED if phase in lock.lock.phases and lock.lock.phases[phase].packages]
        if not phases:
            continue
        try:
            export_lock(lock, Format.PYLOCK, phases, context, refresh=True)
        except (ResolutionError, CheckRefusedError) as error:
            problems.append(f"{shown(path)}: {error.why}")
    if problems:
        raise CheckRefusedError(
            f"{len(problems)} of {len(paths)} locks name files that the index does not have any more",
            why="\n".join(problems),
            fix="Lock again (envbuild lock --stack STACK --upgrade); or keep the files: a folder of find-links, or an "
            "index that drops nothing.",
        )
