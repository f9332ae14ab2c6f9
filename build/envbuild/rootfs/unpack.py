"""An image's files in a directory of this machine: what a sandbox runs in.

Whatever the layers hold, nothing outside of the directory is touched: files are made new in directories that were
opened one below the other without following links, and every link and every attribute comes at the end.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.members import DEVICES, Kind, Member, shown
from envbuild.rootfs.overlay import NO_OVERLAY, Overlay, merged
from envbuild.rootfs.stream import Content

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WORKING_MODE = 0o700
# No other account writes into it, and no program in it has another account's rights.
_MODES = 0o755


def unpack(layers: Sequence[LayerBlob], folder: Path, overlay: Overlay = NO_OVERLAY) -> int:
    """Write the merged layers (lowest first) into ``folder``, which must be empty; returns how many members they have.

    Times are those of the layers. Owners are this process's: an ordinary user could not set others. So set-user-ID and
    set-group-ID bits are left out, which would let other accounts act for that user, and other accounts may not write.
    Devices and extended attributes are left out too.

    Raises:
        CheckRefusedError: a layer is refused. Remove the folder then; what was written into it means nothing.
        MachineError: the disk is full, or refuses a name.
    """
    return write_members(merged(layers, overlay), folder)


def write_members(members: Iterable[tuple[Member, Content | None]], folder: Path) -> int:
    """Write members into ``folder``, which must be empty, as :func:`unpack` does; returns how many there were."""
    with machine_errors(folder):
        if any(folder.iterdir()):
            raise CheckRefusedError(
                f"cannot unpack into {folder}", why="It is not empty.", fix="Remove what is in it, or name another one."
            )
        writer = _Writer(os.open(folder, _FOLDER))
        try:
            for member, content in members:
                writer.add(member, content)
            writer.finish()
        finally:
            writer.close()
    return writer.count


class _Writer:
    """Makes the members below a directory that is held open."""

    def __init__(self, root: int) -> None:
        self._root = root
        # The directory that was used last: members come directory by directory.
        self._open: tuple[str, int] | None = None
        self._folders: list[Member] = []
        self._links: list[Member] = []
        # Names that are left out.
        self._devices: set[str] = set()
        self.count = 0

    def close(self) -> None:
        self._leave()
        os.close(self._root)

    def _leave(self) -> None:
        # Forgotten before it is closed: an interruption between the two must not have it closed twice.
        left, self._open = self._open, None
        if left:
            os.close(left[1])

    def add(self, member: Member, content: Content | None) -> None:
        """Make a file now; keep what has no content for the end."""
        if member.kind in DEVICES or (member.kind is Kind.HARD_LINK and member.link in self._devices):
            self._devices.add(member.name)
            return
        self.count += 0 if member.replaces else 1
        if content is not None:
            self._write(member, content)
        elif member.kind is Kind.DIRECTORY:
            self._folders.append(member)
        else:
            self._links.append(member)

    def finish(self) -> None:
        """Make links, then give directories their modes and times, the deepest first."""
        for member in self._folders:
            # The walk makes what is missing: a directory without a file in it is not there yet.
            os.close(self._walk(member.name))
        for member in self._links:
            self._link(member)
        for member in sorted(self._folders, key=lambda member: member.name.count("/"), reverse=True):
            with self._opened(member.name) as folder:
                # The account that unpacks must be able to work in it and to remove it.
                os.fchmod(folder, member.mode & _MODES | _WORKING_MODE)
                os.utime(folder, (member.mtime, member.mtime))

    def _write(self, member: Member, content: Content) -> None:
        with self._parent(member) as (folder, name):
            if member.replaces:
                os.unlink(name, dir_fd=folder)
            descriptor = os.open(name, _NEW_FILE, 0o600, dir_fd=folder)
            with open(descriptor, "wb", buffering=0) as stream:
                for piece in content.pieces():
                    # Without a buffer, write(2) may take only a part.
                    while piece:
                        piece = piece[stream.write(piece) :]  # noqa: PLW2901 - the rest of it
                os.fchmod(descriptor, member.mode & _MODES | 0o600)
                os.utime(descriptor, (member.mtime, member.mtime))

    def _link(self, member: Member) -> None:
        with self._parent(member) as (folder, name):
            if member.replaces:
                os.unlink(name, dir_fd=folder)
            if member.kind is Kind.SYMLINK:
                os.symlink(member.link, name, dir_fd=folder)
                os.utime(name, (member.mtime, member.mtime), dir_fd=folder, follow_symlinks=False)
            elif member.kind is Kind.FIFO:
                os.mkfifo(name, member.mode & _MODES, dir_fd=folder)
            else:
                place, _, target = member.link.rpartition("/")
                with self._opened(place) as source:
                    os.link(target, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)

    @contextlib.contextmanager
    def _parent(self, member: Member) -> Iterator[tuple[int, str]]:
        """The directory of a member, open, and its name there."""
        place, _, name = member.name.rpartition("/")
        try:
            if self._open is None or self._open[0] != place:
                self._leave()
                self._open = (place, self._walk(place))
            yield self._open[1], name
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ELOOP):
                raise _same_name(member) from error
            raise

    @contextlib.contextmanager
    def _opened(self, place: str) -> Iterator[int]:
        descriptor = self._walk(place)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _walk(self, place: str) -> int:
        """A directory below the root, made where it is missing, and reached without following any link."""
        descriptor = os.dup(self._root)
        # One part at a time (openat(2), O_NOFOLLOW): where a layer has a link in the place of a directory, this fails.
        for part in place.split("/") if place else ():
            above = descriptor
            try:
                try:
                    descriptor = os.open(part, _FOLDER, dir_fd=above)
                except FileNotFoundError:
                    os.mkdir(part, _WORKING_MODE, dir_fd=above)
                    descriptor = os.open(part, _FOLDER, dir_fd=above)
            finally:
                os.close(above)
        return descriptor


def _same_name(member: Member) -> CheckRefusedError:
    """The error where the disk takes two names of an image for one."""
    return CheckRefusedError(
        f"the image's {shown(member.name)} cannot be unpacked here",
        why="There is already something of that name: the disk does not tell letters' case apart, or changes names.",
        fix="Point ENVBUILD_CACHE_DIR at a disk with an ordinary Linux file system.",
    )
