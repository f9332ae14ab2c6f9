"""What is not needed any more: wheels unused for a while, abandoned builds, and what is made again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.core import locks
from envbuild.core.errors import CheckRefusedError
from envbuild.git.checkout import KIND as TREES_KIND
from envbuild.git.mirror import KIND as MIRRORS_KIND
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.models import Lock
from envbuild.store import entry_index
from envbuild.store.local import LocalStore
from envbuild.wheels.cache.entry import BUILDS_KIND, ENVIRONMENTS_KIND, KIND, read_kept
from envbuild.wheels.key import KeyParts
from envbuild.wheels.plan import buildable
from envbuild.wheels.toolchain.index_toolkit import KIND as TOOLKITS_KIND

DAY_SECONDS = 86400.0
# A mirror that was used lately may be in use.
MIRROR_REST_SECONDS = 3600.0
MADE_AGAIN = {
    TOOLKITS_KIND: "CUDA toolkit",
    ENVIRONMENTS_KIND: "build environment",
    TREES_KIND: "sources of a commit",
    MIRRORS_KIND: "git mirror",
}


@dataclass(frozen=True, kw_only=True)
class Old:
    """Something that can go.

    Attributes:
        kind: the folder of the store that it is in.
        key: its name there.
        name: what it is, for people.
    """

    kind: str
    key: str
    name: str
    why: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """What can go, and what is old and stays since a lock needs it."""

    old: tuple[Old, ...]
    needed: tuple[Old, ...]


def plan_pruning(
    store: LocalStore, lock_directories: Iterable[LockDirectory], *, unused_days: float, force: bool
) -> Pruning:
    """What was not used for some days, and damaged wheels.

    Args:
        lock_directories: the locks whose wheels stay.
        force: what a lock needs goes, too.
    """
    wanted = [directory.lock for directory in lock_directories]
    since = time.time() - unused_days * DAY_SECONDS
    old: list[Old] = []
    needed: list[Old] = []
    for path in _folders(store, KIND):
        try:
            record = read_kept(path)
        except CheckRefusedError as error:
            old.append(_old(KIND, path, path.name[:12], f"damaged: {error.why.replace(f' ({path})', '')}"))
            continue
        if problem := entry_index.find_damage(path):
            old.append(_old(KIND, path, record.file, f"damaged: {problem}"))
        elif path.stat().st_mtime <= since:
            directory = _old(KIND, path, record.file, _unused(path.stat().st_mtime))
            stays = not force and any(_needs(lock, record.parts) for lock in wanted)
            (needed if stays else old).append(directory)
    # A build is abandoned once its wheel is there; a wheel that goes now does not count.
    kept = {path.name for path in _folders(store, KIND)} - {directory.key for directory in old}
    old += _builds(store, since, kept)
    old += _made_again(store, since)
    return Pruning(old=tuple(old), needed=tuple(needed))


def _builds(store: LocalStore, since: float, kept: set[str]) -> Iterator[Old]:
    """Folders of builds that were stopped: those whose wheel is there, and those that were not continued."""
    for path in _folders(store, BUILDS_KIND):
        if path.name in kept:
            yield _old(BUILDS_KIND, path, path.name[:12], "an abandoned build; its wheel is there")
        elif (last := _last_change(path)) <= since:
            yield _old(BUILDS_KIND, path, path.name[:12], f"an abandoned build, {_unused(last)}")


def _made_again(store: LocalStore, since: float) -> Iterator[Old]:
    """What is made or fetched again when it is next needed, and was not used: no lock keeps it."""
    for kind, what in MADE_AGAIN.items():
        for path in _folders(store, kind):
            last = _last_use(path, kind)
            if last <= since:
                yield _old(kind, path, f"{what} {path.name[:12]}", _unused(last))


def _last_use(path: Path, kind: str) -> float:
    if kind != MIRRORS_KIND:
        return path.stat().st_mtime
    # A fetch, or a look at the server, changes a file on top. Nobody holds a mirror while git reads from it.
    last = max(part.stat().st_mtime for part in (path, *path.iterdir()))
    return last if last <= time.time() - MIRROR_REST_SECONDS else float("inf")


def remove(store: LocalStore, old: Sequence[Old]) -> tuple[Old, ...]:
    """Remove what can go, unless somebody is at it right now; returns what went."""
    gone = []
    for entry in old:
        # A build's folder has no lock of its own: it is written under the lock of the wheel that it makes.
        maker = KIND if entry.kind == BUILDS_KIND else entry.kind
        files = (store.lock_of(maker, entry.key), store.in_use(entry.kind, entry.key))
        with contextlib.ExitStack() as stack:
            if not all(stack.enter_context(locks.exclusive_if_free(file)) for file in files if file.exists()):
                store.reporter.note(f"{entry.name} is in use and stays")
                continue
            store.remove(entry.kind, entry.key)
            gone.append(entry)
    return tuple(gone)


def _needs(lock: Lock, parts: KeyParts) -> bool:
    """Whether a lock is installed with wheels of these parts, on any target."""
    torch, base = lock.torch, lock.base
    return (
        any(origin.is_of(parts) for origin in buildable(LockDirectory(Path(), lock)).values())
        and (torch.version, torch.build) == (parts.torch.version, parts.torch.build)
        and parts.python == "cp" + base.python.replace(".", "")
    )


def _folders(store: LocalStore, kind: str) -> list[Path]:
    folder = store.root / kind
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _old(kind: str, path: Path, name: str, why: str) -> Old:
    return Old(kind=kind, key=path.name, name=name, why=why, size_bytes=sum(info.st_size for info in _files(path)))


def _last_change(path: Path) -> float:
    return max((info.st_mtime for info in _files(path)), default=path.stat().st_mtime)


def _files(path: Path) -> Iterator[os.stat_result]:
    for folder, _, names in os.walk(path):
        for name in names:
            # A build that goes on meanwhile removes and renames its files.
            with contextlib.suppress(FileNotFoundError):
                yield Path(folder, name).lstat()


def _unused(last: float) -> str:
    return f"not used for {max(0.0, time.time() - last) / DAY_SECONDS:.0f} days"
