"""A tree put together from layers by hard links, and what was added to it since.

Nothing is ever written into a file of it: whoever replaces one makes a new file in its place.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.rootfs.layer_writer import walk

_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)
BYTECODE = "__pycache__"


class _Placed(NamedTuple):
    """A file that was put into the tree: the layer it is of, its original, and what it looked like."""

    layer: str
    original: Path
    looks: tuple[int, int, int]


class Assembly:
    """Layers in one tree, lowest first.

    Args:
        may_differ: whether several layers may each have their own file at a path; the uppermost is seen then.
    """

    def __init__(self, tree: Path, may_differ: Callable[[str], bool] = lambda _: False) -> None:
        self.tree = tree
        self._may_differ = may_differ
        self._placed: dict[str, _Placed] = {}
        with machine_errors(tree):
            tree.mkdir()

    def add(self, layer: str, tree: Path) -> None:
        """Put a layer over those that are there.

        Raises:
            CheckRefusedError: a layer below has another file of the same name.
        """
        with machine_errors(self.tree):
            for path, relative, info in walk(tree):
                place = self.tree / relative
                if stat.S_ISDIR(info.st_mode):
                    place.mkdir(exist_ok=True)
                    continue
                if below := self._placed.get(relative):
                    self._refuse_other(below, layer, path, relative)
                if not _is_same(info, place):
                    place.unlink(missing_ok=True)
                    link(path, place)
                self._placed[relative] = _Placed(layer, path, _looks(place.lstat()))

    def added(self) -> list[str]:
        """The files that are new in the tree, or in the place of another, since the last layer was added.

        Raises:
            CheckRefusedError: a file of a layer was removed, or written into.
        """
        found = []
        missing = set(self._placed)
        for _, relative, info in walk(self.tree):
            if stat.S_ISDIR(info.st_mode):
                continue
            placed = self._placed.get(relative)
            missing.discard(relative)
            if placed is None or placed.looks[0] != info.st_ino:
                found.append(relative)
            elif placed.looks != _looks(info):
                raise self._touched(relative, "was written into")
        for relative in sorted(missing):
            raise self._touched(relative, "was removed")
        return found

    def _touched(self, relative: str, what: str) -> CheckRefusedError:
        placed = self._placed[relative]
        entry = placed.original.parents[len(Path(relative).parts) - 1].parent
        return CheckRefusedError(
            f"the installation of a package changed layer {placed.layer}",
            why=f"{relative} {what}. That layer is shared, and no other may change it.",
            fix="Find the package whose build does that, and build its wheel elsewhere (`envbuild wheels`). What was "
            f"written into is uv's copy too: remove {entry} and {entry.parents[1] / 'uv'}, and run the same command "
            "again.",
        )

    def _refuse_other(self, below: _Placed, layer: str, path: Path, relative: str) -> None:
        if _is_bytecode(relative) or self._may_differ(relative) or same_content(below.original, path):
            return
        raise CheckRefusedError(
            f"packages of two layers bring different files of one name: {relative}",
            why=f"Layer {below.layer} has one and layer {layer} another; one package would run with the other's.",
            fix="Leave one of the two packages out of the stack ([requirements] and exclude), or choose versions that "
            "agree. Where it does not matter whose file it is, say so under overlaps in containers/native/layers.toml.",
        )


def link(source: Path, place: Path) -> None:
    """Give ``place`` the file or link ``source``: a hard link where the disk allows it, else a copy."""
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copy2(source, place, follow_symlinks=False)


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


def _looks(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_ino, info.st_size, info.st_mtime_ns


def _is_same(info: os.stat_result, place: Path) -> bool:
    try:
        there = place.lstat()
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (info.st_dev, info.st_ino)
