"""The wheelhouse: wheels by build key, each with the parts of its key, what it contains, and its build log."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from envbuild.core import locks
from envbuild.core.digests import Json, sha256_file, short
from envbuild.core.errors import CheckRefusedError, ConfigurationError
from envbuild.store import entry_index
from envbuild.store.local import LocalStore
from envbuild.store.remote import Remote
from envbuild.wheels.cache.entry import KIND, RECORD_FILE, Built, WheelRecord, fill, read_kept, sign_off
from envbuild.wheels.cache.remote import RemoteWheels

__all__ = ["KIND", "NO_BUILT", "RECORD_FILE", "Built", "WheelRecord", "Wheelhouse", "digests_of", "fill"]

# So many keys are named where one is not clear.
NAMED = 5
# For those who take wheels and have none.
NO_BUILT: Mapping[str, Built] = MappingProxyType({})


def digests_of(wheels: Mapping[str, Built]) -> dict[str, Json]:
    """The digest of each wheel, by package."""
    return {name: built.record.digest for name, built in sorted(wheels.items())}


class Wheelhouse:
    """The wheels of a store. Entries are complete or absent, never changed, and named by their key.

    Args:
        remotes: remote stores; what is not here is looked for there, and what is built here is pushed there.
        lock: digest of the lock that wheels are built for.
    """

    def __init__(self, store: LocalStore, remotes: Sequence[Remote] = (), lock: str = "") -> None:
        self._store = store
        self._lock = lock
        self.remote = RemoteWheels(store, remotes)

    def find(self, key: str) -> Built | None:
        """The wheel of a key, verified, from here or from a remote store; None when it is nowhere, or was damaged.

        Raises:
            NetworkError: a remote store that is to be read cannot be reached or refuses.
        """
        self.set_aside(key)
        path = self._store.find(KIND, key)
        came_from = "" if path is not None else self.remote.fetch(key)
        if path is None and not came_from:
            return None
        built = self.mark_used(self._read(self._store.path_of(KIND, key)))
        return dataclasses.replace(built, fetched=came_from)

    def set_aside(self, key: str) -> None:
        """Remove an entry whose files are whole, and whose record has another key."""
        path = self._store.path_of(KIND, key)
        # Two entries swapped by hand are whole each, and the index of each holds: only the key in the record tells.
        if not path.is_dir() or entry_index.find_damage(path) or not _wrong(path):
            return  # a damaged entry is reported and built again by the store's own find
        # Looked at again under the lock: another process may have built the right one meanwhile.
        with locks.exclusive(self._store.lock_of(KIND, key)):
            if problem := _wrong(path):
                self._store.reporter.note(f"the wheelhouse's entry {short(key)} is set aside: {problem}")
                self._store.remove(KIND, key)

    def get_or_build(self, key: str, build: Callable[[Path], None]) -> Built:
        """The wheel of a key; when absent ``build`` fills a folder with wheel, record and log.

        What was built is pushed to the remote stores that are written. A push that fails is reported, not raised.
        """

        def made(folder: Path) -> None:
            build(folder)
            sign_off(folder, self._lock, self._places())

        entry = self._store.get_or_build(KIND, key, made)
        built = dataclasses.replace(self._read(entry.path), built=entry.built)
        if not entry.built:
            return built
        pushed = self.remote.push_built(built)
        # Read again: another machine's wheel may have taken this one's place while it was pushed.
        return dataclasses.replace(self._read(entry.path), built=True, pushed=pushed)

    def _places(self) -> dict[str, str]:
        """Folders of this machine, and what stands for each in a log that others read."""
        places = {str(Path.home()): "~", str(self._store.root): "STORE"}
        return {**places, sys.prefix: "ENVBUILD"} if sys.prefix != sys.base_prefix else places

    def mark_used(self, built: Built) -> Built:
        """Note that a wheel was used now: the time of its folder, which `prune` goes by."""
        # The folder's own time is set: access times are not kept on disks mounted noatime or relatime (mount(8)).
        with contextlib.suppress(OSError):  # a store that others own
            os.utime(built.path)
        return built

    def all(self) -> Iterator[Built]:
        """Every wheel whose record can be read, by package, version and key."""
        wheels = []
        for path in self.entries():
            with contextlib.suppress(CheckRefusedError):
                wheels.append(self._read(path))

        def order(built: Built) -> tuple[str, str, str]:
            return built.record.parts.package, built.record.parts.version, built.record.key

        yield from sorted(wheels, key=order)

    def problems(self) -> dict[str, str]:
        """What is wrong with entries, all of each read again, by the entry's name; empty when nothing is."""
        problems = {}
        for path in self.entries():
            try:
                problem = self.problem(self._read(path))
            except CheckRefusedError as error:
                problem = error.why
            if problem:
                problems[path.name] = problem
        return problems

    def entries(self) -> list[Path]:
        """The folders of all entries, readable or not."""
        folder = self._store.root / KIND
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def by_prefix(self, text: str) -> Built:
        """The wheel whose key begins with ``text`` (hex digits, with or without ``sha256:``).

        Raises:
            ConfigurationError: none does, or several do.
        """
        here = {built.record.key: built for built in self.all()}
        return here[key_by_prefix(text, {key: built.record.file for key, built in here.items()})]

    def problem(self, built: Built) -> str:
        """What is wrong with an entry, all of it read again; empty when nothing is."""
        try:
            if sha256_file(built.wheel) != built.record.digest:
                return f"{built.record.file} is not the wheel that was kept"
        except FileNotFoundError:
            return f"{built.record.file} is missing"
        return entry_index.find_damage(built.path)

    def _read(self, path: Path) -> Built:
        return Built(path=path, record=read_kept(path))


def _wrong(path: Path) -> str:
    """What is wrong with the record of an entry; empty when nothing is, or it is not there."""
    try:
        read_kept(path)
    except CheckRefusedError as error:
        return error.why if path.is_dir() else ""
    return ""


def key_by_prefix(text: str, known: Mapping[str, str]) -> str:
    """The key that begins with ``text``, of those known with what is under them.

    Raises:
        ConfigurationError: none does, or several do.
    """
    wanted = text.removeprefix("sha256:")
    if not wanted:
        raise ConfigurationError(
            "no wheel is named",
            why="The key is empty.",
            fix="Give the beginning of a key; `envbuild wheels list` has them all.",
        )
    matching = {key: name for key, name in known.items() if key.removeprefix("sha256:").startswith(wanted)}
    if len(matching) != 1:
        near = list(matching) or _nearest(wanted, list(known))
        names = ", ".join(f"{short(key)} ({known[key]})" for key in near[:NAMED])
        more = len(near) - NAMED
        names += f" and {more} more" if more > 0 else ""
        raise ConfigurationError(
            f"{'several wheels have' if matching else 'no wheel has'} a key that begins with {wanted!r}",
            why=f"{'They are' if matching else 'There are'}: {names or 'no wheels'}.",
            fix="Give more of the key; `envbuild wheels list` has them all.",
        )
    return next(iter(matching))


def _nearest(wanted: str, keys: list[str]) -> list[str]:
    """Keys in the order of how much of their beginning they share with a text."""

    def shared(key: str) -> int:
        return len(os.path.commonprefix([wanted, key.removeprefix("sha256:")]))  # noqa: RUF071 - characters are meant

    return sorted(keys, key=lambda key: (-shared(key), key))
