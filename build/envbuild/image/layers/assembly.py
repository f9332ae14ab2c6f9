"""A tree put together from layers by hard links, and what was added to it since.

Its files are shared with the store. A file is replaced by a new one, and never written in place.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import link, machine_errors
from envbuild.rootfs.layer_writer import walk

BYTECODE = "__pycache__"


class _Placed(NamedTuple):
    """A file of the tree: its layer, its original, and its inode, size and time."""

    layer: str
    original: Path
    identity: tuple[int, int, int]


class Assembly:
    """Layers in one tree, lowest first.

    Args:
        may_differ: whether several layers may each have their own file at a path; the uppermost holds.
    """

    def __init__(self, tree: Path, may_differ: Callable[[str], bool] = lambda _: False) -> None:
        self.tree = tree
        self._may_differ = may_differ
        self._placed: dict[str, _Placed] = {}
        with machine_errors(tree):
            tree.mkdir()

    def add(self, layer: str, tree: Path) -> None:
        """Put a layer over the others.

        Raises:
            CheckRefusedError: a layer below has another file of the same name.
        """
        with machine_errors(self.tree):
            for path, relative, info in walk(tree):
                target = self.tree / relative
                if stat.S_ISDIR(info.st_mode):
                    target.mkdir(exist_ok=True)
                    continue
                if below := self._placed.get(relative):
                    self._refuse_other(below, layer, path, relative)
                if not _is_same(info, target):
                    target.unlink(missing_ok=True)
                    link(path, target)
                self._placed[relative] = _Placed(layer, path, _identity(target.lstat()))

    def added(self) -> list[str]:
        """The files that are new in the tree, or in the place of another, since the last layer was added.

        Raises:
            CheckRefusedError: a file of a layer was removed, or written into.
        """
        paths = []
        missing = set(self._placed)
        for _, relative, info in walk(self.tree):
            if stat.S_ISDIR(info.st_mode):
                continue
            placed = self._placed.get(relative)
            missing.discard(relative)
            if placed is None or placed.identity[0] != info.st_ino:
                paths.append(relative)
            elif placed.identity != _identity(info):
                raise self._changed(relative, "was written into")
        if missing:
            raise self._changed(min(missing), "was removed")
        return paths

    def _changed(self, relative: str, what: str) -> CheckRefusedError:
        placed = self._placed[relative]
        entry = placed.original.parents[len(Path(relative).parts) - 1].parent
        return CheckRefusedError(
            f"the installation of a package changed layer {placed.layer}",
            why=f"{relative} {what}. The layer is shared with other images and must stay as it is.",
            fix="Find the package whose build does that, and build its wheel with `envbuild wheels`. uv's cache has "
            f"the changed file too: remove {entry} and {entry.parents[1] / 'uv'}, and run the same command "
            "again.",
        )

    def _refuse_other(self, below: _Placed, layer: str, path: Path, relative: str) -> None:
        # Bytecode may differ: each layer compiles an __init__.py that both have by itself.
        if _is_bytecode(relative) or self._may_differ(relative) or same_content(below.original, path):
            return
        raise CheckRefusedError(
            f"packages of two layers bring different files of one name: {relative}",
            why=f"Layer {below.layer} has one and layer {layer} another; one package would run with the other's.",
            fix="Leave one of the two packages out of the stack ([requirements] and exclude), or choose versions that "
            "agree. Where either file will do, list it under overlaps in containers/native/layers.toml.",
        )


def same_content(one: Path, other: Path) -> bool:
    """Whether two files have the same bytes and both can be executed or neither, or two links the same target."""
    first, second = one.lstat(), other.lstat()
    if stat.S_IFMT(first.st_mode) != stat.S_IFMT(second.st_mode):
        return False
    if stat.S_ISLNK(first.st_mode):
        return one.readlink() == other.readlink()
    executable = bool(first.st_mode & stat.S_IXUSR) == bool(second.st_mode & stat.S_IXUSR)
    return executable and first.st_size == second.st_size and one.read_bytes() == other.read_bytes()


def _is_bytecode(relative: str) -> bool:
    return Path(relative).parent.name == BYTECODE


def _identity(info: os.stat_result) -> tuple[int, int, int]:
    # Not the change time: a further hard link to the file sets it (link(2)).
    return info.st_ino, info.st_size, info.st_mtime_ns


def _is_same(info: os.stat_result, target: Path) -> bool:
    try:
        status = target.lstat()
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) == (info.st_dev, info.st_ino)
