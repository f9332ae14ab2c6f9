"""A store in a local directory: ``<root>/<kind>/<key>/`` is there whole, or it is not there.

No other account enters it: entries hold whole root file systems, of images that others made. Its owner may open folders
of entries for reading, and they stay so; one that others may write to is refused.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.core import locks
from envbuild.core.digests import short
from envbuild.core.errors import MachineError
from envbuild.core.files import PRIVATE, machine_errors, make_own, make_private, remove_tree, write_atomic
from envbuild.core.progress import Reporter, SilentReporter
from envbuild.store import entry_index

# Written last into a folder that is made in its place: without it, the folder is half made.
COMPLETE = "complete"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A complete entry, and whether this call made it."""

    path: Path
    built: bool


class LocalStore:
    """Entries are directories named by the digest of what made them; two builders of one key become one."""

    def __init__(self, root: Path, reporter: Reporter) -> None:
        self.root = root
        self.reporter = reporter
        self._reported: set[Path] = set()
        self._used: set[Path] = set()
        self._own: set[str] = set()

    @property
    def is_writable(self) -> bool:
        """Whether something can be put there: a cache that others keep may be mounted read-only."""
        place = self.root
        while not place.exists():
            place = place.parent
        return os.access(place, os.W_OK | os.X_OK)

    def path_of(self, kind: str, key: str) -> Path:
        """Where the entry of ``key`` (``sha256:<hex>``) is or would be."""
        return self.root / kind / key.removeprefix("sha256:")

    def use(self, kind: str, key: str) -> None:
        """Note that an entry is used now, and by this process until it ends: pruning goes by both."""
        path = self.path_of(kind, key)
        with contextlib.suppress(OSError):  # a store that others own
            # The time of the folder is that of its last use, by which `wheels prune` chooses.
            os.utime(path)
        if path not in self._used and self.is_writable:
            self._used.add(path)
            locks.share_until_exit(self.in_use(kind, path.name))

    def lock_of(self, kind: str, key: str) -> Path:
        """The lock file that who makes an entry holds."""
        return self.root / "locks" / f"{kind}-{self.path_of(kind, key).name}.lock"

    def in_use(self, kind: str, name: str) -> Path:
        """The lock file that all who use an entry hold."""
        return self.root / "locks" / f"{kind}-{name}-in-use.lock"

    def refuse_writable(self, kind: str) -> None:
        """Refuse the store where other accounts can put entries of a kind, or take them away.

        Raises:
            MachineError: its folder, or that of the kind, is open to them for writing.
        """
        for folder in () if kind in self._own else (self.root, self.root / kind):
            try:
                mode = folder.stat().st_mode
            except OSError:
                continue  # it is made later, or cannot be read, as whoever reads it says
            # With the sticky bit, as in /tmp, others can put something there, and take nothing away.
            if mode & WRITABLE_BY_OTHERS and not (folder == self.root and mode & stat.S_ISVTX):
                raise MachineError(
                    f"the cache {folder} is refused",
                    why=f"Other accounts may write to it (mode {stat.S_IMODE(mode):o}): what is in it need not be what "
                    "envbuild put there.",
                    fix=f"Take that right away: chmod go-w {shlex.quote(str(folder))}. For reading it may stay open.",
                )
        self._own.add(kind)

    def find(self, kind: str, key: str) -> Path | None:
        """The entry's directory if it is there, whole and unchanged since it was made."""
        path = self.path_of(kind, key)
        self.refuse_writable(kind)
        if not path.is_dir():
            return None
        problem = _damage(path)
        if problem:
            # Asked again: an entry that another process takes away meanwhile looks damaged, and is not.
            if path.is_dir() and path not in self._reported:
                self._reported.add(path)
                self.reporter.note(f"{kind} {short(key)} in the store was damaged ({problem}): it is made anew")
            return None
        return path

    def get_or_build(self, kind: str, key: str, build: Callable[[Path], None]) -> Entry:
        """The entry of ``key``; when absent, ``build`` fills a staging directory that becomes the entry by a rename.

        If ``build`` raises, or the process dies, no entry appears.
        """
        return self._entry(kind, key, build, again=False)

    def rebuild(self, kind: str, key: str, build: Callable[[Path], None]) -> Entry:
        """Like :meth:`get_or_build`, but builds even when the entry is there and then takes its place.

        Until the new one is complete the old one stays; if ``build`` raises, it stays for good.
        """
        return self._entry(kind, key, build, again=True)

    def _entry(self, kind: str, key: str, build: Callable[[Path], None], *, again: bool) -> Entry:
        path = self.path_of(kind, key)
        if not again and self.find(kind, key):
            return Entry(path=path, built=False)
        self.refuse_writable(kind)
        self._make_root()
        lock = self.lock_of(kind, key)
        waiting = f"another envbuild is making {kind} {short(key)}: waiting for it"
        with locks.exclusive(lock, on_wait=lambda: self.reporter.note(waiting)):
            # Who held the lock until now may have made it.
            if not again and _damage(path) == "":
                return Entry(path=path, built=False)
            with self.staging(kind) as staged:
                content = staged / "entry"
                content.mkdir(PRIVATE)
                build(content)
                with machine_errors(path):
                    # Before the rename: from then on others read the entry without a lock.
                    entry_index.write_index(content)
                    make_own(path.parent)
                    _open_as(path.parent, content)
                    if path.is_dir():
                        # Removed with the staging directory; a process that reads it keeps what it has open.
                        path.rename(staged / "replaced")
                    content.rename(path)
                    self._reported.discard(path)
        return Entry(path=path, built=True)

    @contextlib.contextmanager
    def staging(self, label: str) -> Iterator[Path]:
        """A private directory on the store's disk, removed at the end; leftovers of dead processes go first."""
        self._make_root()
        area = self.root / "staging"
        with machine_errors(area):
            make_private(area)
        # The kernel releases the locks of a dead process, so a lock that is free has a folder that is not in use.
        self._sweep(area)
        folder = area / f"{label}-{os.getpid()}-{secrets.token_hex(4)}"
        lock = folder.with_suffix(".lock")
        with locks.exclusive(lock):
            try:
                with machine_errors(folder):
                    folder.mkdir(PRIVATE)
                yield folder
            finally:
                remove_tree(folder)
                lock.unlink(missing_ok=True)

    def make_in_place(
        self, kind: str, key: str, what: str, is_whole: Callable[[Path], bool], make: Callable[[Path], None]
    ) -> Path:
        """A folder whose content names its own place, so that it is filled there; used until this process ends.

        Args:
            what: what it is, for people.
            is_whole: whether a folder that was completed can still be used; else it is made anew.
        """
        folder = self.path_of(kind, key)
        self.refuse_writable(kind)
        waiting = f"another envbuild is making {what} {short(key)}: waiting for it"
        with locks.exclusive(self.lock_of(kind, key), on_wait=lambda: self.reporter.note(waiting)):
            if not ((folder / COMPLETE).is_file() and is_whole(folder)):
                with machine_errors(folder):
                    remove_tree(folder)
                    make_own(folder.parent)
                    folder.mkdir(0o755)
                make(folder)
                write_atomic(folder / COMPLETE, f"{key}\n")
            self.use(kind, key)
        return folder

    def remove(self, kind: str, key: str) -> None:
        """Remove an entry: renamed away first, so that no reader sees half of it."""
        path = self.path_of(kind, key)
        # A rename takes the whole entry at once; its files go with the staging directory.
        with self.staging("removed") as folder, contextlib.suppress(FileNotFoundError):
            path.rename(folder / "entry")

    def _make_root(self) -> None:
        with machine_errors(self.root):
            # One that is there may be anything's (/var/cache, /tmp), and stays as it is.
            make_own(self.root)
            # Who may open a lock file may hold it.
            for name in ("locks", "logs"):
                make_private(self.root / name)

    def _sweep(self, area: Path) -> None:
        for lock in area.glob("*.lock"):
            # Held while sweeping: a process that is about to take this lock waits, and then makes a new file.
            with locks.exclusive_if_free(lock) as free, contextlib.suppress(OSError):
                if free:
                    remove_tree(lock.with_suffix(""))
                    lock.unlink()


def _damage(entry: Path) -> str:
    """What is wrong with an entry; empty when nothing is."""
    # They could put another index there, too.
    if entry.is_dir() and entry.stat().st_mode & WRITABLE_BY_OTHERS:
        return "other accounts may write to it"
    return entry_index.find_damage(entry)


def _open_as(kind: Path, entry: Path) -> None:
    """Open a new entry for those to whom its owner has opened the folder of its kind; nobody else writes to it.

    Root file systems stay closed: others could run setuid programs in them.
    """
    mode = stat.S_IMODE(kind.stat().st_mode) & ~WRITABLE_BY_OTHERS
    if mode == PRIVATE or (entry / entry_index.UNINDEXED_FOLDER).exists():
        return
    for path in (entry, *entry.rglob("*")):
        if (open_to := path.stat().st_mode) & WRITABLE_BY_OTHERS:
            path.chmod(stat.S_IMODE(open_to) & ~WRITABLE_BY_OTHERS)
    entry.chmod(mode | PRIVATE)


# For what is large, or outlasts a reboot (FHS 3.0, 5.15).
LARGE = Path("/var/tmp")  # noqa: S108 - a private folder in it


def temporary_store(folder: Path | None = None, *, within: Path | None = None) -> LocalStore:
    """Where things are mounted or unpacked; what a killed process left there goes at the next use.

    Args:
        folder: a directory of the caller's; a private one for each account when None.
        within: what that private one lies in; the system's temporary directory when None.

    Raises:
        MachineError: the folder is another account's.
    """
    if folder is None:
        folder = (within or Path(tempfile.gettempdir())) / f"envbuild-{os.geteuid()}"
        with machine_errors(folder):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(PRIVATE)
            # The name can be guessed, and /tmp is open to all: another account may have made it first.
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                raise MachineError(
                    f"{folder} belongs to another account",
                    why="Images are mounted and unpacked below it, so no other account may change it.",
                    fix="Have it removed, or set TMPDIR to a directory of your own.",
                )
            make_private(folder)
    return LocalStore(folder, SilentReporter())


def place_with_devices() -> Path | None:
    """A directory for temporary files on a disk where programs and device nodes work; None where there is none."""
    for place in (Path(tempfile.gettempdir()), LARGE):
        with contextlib.suppress(OSError):
            flags = os.statvfs(place).f_flag
            if os.access(place, os.W_OK | os.X_OK) and not flags & (os.ST_NODEV | os.ST_NOEXEC | os.ST_RDONLY):
                return place
    return None
