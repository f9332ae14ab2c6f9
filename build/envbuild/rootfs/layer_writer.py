"""Layers: tars that are a function of their content alone, gzipped."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import machine_errors
from envbuild.rootfs.gzip_writer import GzipWriter
from envbuild.rootfs.layer import LayerRecord

if TYPE_CHECKING:
    from typing_extensions import Self

# Every file of a layer has this time (2000-01-01). It does not depend on the lock, so that locks share layers.
EPOCH = 946684800
COPY_BYTES = 1 << 20


class Rights(NamedTuple):
    """Mode, owner and group of a member."""

    mode: int
    uid: int = 0
    gid: int = 0


def kept_rights(name: str, info: os.stat_result) -> Rights:  # noqa: ARG001 - a rule sees the name
    """The rule that keeps a file's mode; all belongs to root."""
    return Rights(stat.S_IMODE(info.st_mode))


def plain_rights(name: str, info: os.stat_result) -> Rights:  # noqa: ARG001 - a rule sees the name
    """The rule of installed packages: 755 or 644 of root, whatever the umask of the builder was."""
    return Rights(0o755 if stat.S_ISDIR(info.st_mode) or info.st_mode & stat.S_IXUSR else 0o644)


class LayerWriter:
    """Writes a layer: members in the order in which they are added, every time stamp the same."""

    def __init__(self, path: Path, epoch: int) -> None:
        self._epoch = epoch
        self._gzip = GzipWriter(path)
        # Surrogates carry names that are no UTF-8 through Python's strings and back.
        self._tar = tarfile.TarFile(
            fileobj=cast("BinaryIO", self._gzip),
            mode="w",
            format=tarfile.GNU_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
            copybufsize=COPY_BYTES,
        )
        self.entries = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._gzip.__exit__(kind)
            return
        with self._gzip:
            self._tar.close()

    def record(self, name: str) -> LayerRecord:
        """What the finished layer is, under the name ``name``."""
        return LayerRecord(
            name=name,
            digest=self._gzip.digest,
            diff_id=self._gzip.plain_digest,
            size_bytes=self._gzip.bytes,
            unpacked_bytes=self._gzip.plain_bytes,
            entries=self.entries,
        )

    def add_tree(
        self,
        tree: Path,
        prefix: str = "",
        *,
        rights: Callable[[str, os.stat_result], Rights] = kept_rights,
    ) -> None:
        """Add everything below ``tree`` under ``prefix``, sorted; hard links within the tree stay hard links.

        Raises:
            CheckRefusedError: there is something other than files, directories and links.
        """
        first_names: dict[tuple[int, int], str] = {}
        for path, relative, info in walk(tree):
            name = f"{prefix}/{relative}" if prefix else relative
            member = self._member(name, rights(name, info))
            if stat.S_ISDIR(info.st_mode):
                member.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(info.st_mode):
                member.type = tarfile.SYMTYPE
                # Modes of links mean nothing on Linux, and always show as 777 (symlink(7)).
                member.mode = 0o777
                member.linkname = str(path.readlink())
            elif not stat.S_ISREG(info.st_mode):
                raise CheckRefusedError(
                    f"{path} cannot be put into a layer",
                    why=f"Its type is {stat.filemode(info.st_mode)[0]!r}; layers hold files, directories and links.",
                    fix="Find the package that brings it, and leave it out.",
                )
            elif info.st_nlink > 1 and (first := first_names.setdefault((info.st_dev, info.st_ino), name)) != name:
                member.type = tarfile.LNKTYPE
                member.linkname = first
            else:
                self._add_file(member, path, info.st_size)
                continue
            self._add(member, None)

    def add_directory(self, name: str) -> None:
        member = self._member(name, Rights(0o755))
        member.type = tarfile.DIRTYPE
        self._add(member, None)

    def add_bytes(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """Add a file with the content ``data``."""
        member = self._member(name, Rights(mode))
        member.size = len(data)
        self._add(member, io.BytesIO(data))

    def _member(self, name: str, rights: Rights) -> tarfile.TarInfo:
        member = tarfile.TarInfo(name)
        member.mode, member.uid, member.gid = rights
        member.mtime = self._epoch
        return member

    def _add_file(self, member: tarfile.TarInfo, path: Path, size: int) -> None:
        member.size = size
        with machine_errors(path), path.open("rb") as stream:
            self._add(member, stream)

    def _add(self, member: tarfile.TarInfo, stream: BinaryIO | None) -> None:
        self._tar.addfile(member, stream)
        # tarfile keeps every member for reading back.
        self._tar.members = []  # type: ignore[attr-defined]
        self.entries += 1


def walk(tree: Path) -> Iterator[tuple[Path, str, os.stat_result]]:
    """Everything below ``tree`` in the order of the names' bytes: path, relative name, status. Follows no links."""
    pending = [(tree, "")]
    while pending:
        folder, above = pending.pop()
        with os.scandir(folder) as listing:
            # Neither the disk's order nor the locale's: the same tree gives the same tar.
            entries = sorted(listing, key=lambda entry: os.fsencode(entry.name))
        folders = []
        for entry in entries:
            relative = f"{above}{entry.name}"
            info = entry.stat(follow_symlinks=False)
            yield Path(entry.path), relative, info
            if stat.S_ISDIR(info.st_mode):
                folders.append((Path(entry.path), relative + "/"))
        pending.extend(reversed(folders))
