"""A .sqsh: unpacked into a folder of the store while it is read. enroot's have root as the owner of everything."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from envbuild.core.digests import sha256_file
from envbuild.core.errors import MachineError, disk_full
from envbuild.core.files import machine_errors
from envbuild.core.outcome import ran_out_of_space, tail
from envbuild.core.process import find_tool, run
from envbuild.image.layers import walk
from envbuild.image.merging.members import Kind, Member
from envbuild.image.merging.stream import Content
from envbuild.image.opening.model import OpenedImage, OpenedLayer, not_an_image

MAGIC = b"hsqs"
PIECE_BYTES = 1 << 20
_LABEL = re.compile(r"^# (?P<name>\S+) (?P<value>.*)$")


def open_sqsh(file: Path, scratch: Path) -> OpenedImage:
    """The image of a .sqsh: one layer, with the configuration that its own files tell.

    Args:
        scratch: where it is unpacked to.

    Raises:
        CheckRefusedError: it cannot be unpacked.
        MachineError: unsquashfs is missing, or the disk is full.
    """
    tree = scratch / "unpacked"
    tool = find_tool("unsquashfs", "squashfs-tools")
    words: list[str | Path] = [tool, "-no-progress", "-no-xattrs", "-force", "-dest", tree, file]
    finished = run(words, what=f"unpack {file}", check=False, error=MachineError)
    if finished.status != 0:
        if ran_out_of_space(finished.output, scratch):
            raise disk_full(scratch)
        raise not_an_image(file, tail(finished.output))

    with machine_errors(file, "read"):
        size = file.stat().st_size
        layer = OpenedLayer(digest=sha256_file(file), size_bytes=size, name="the .sqsh", members=lambda: _members(tree))
    return OpenedImage(
        source=str(file), kind="sqsh", digest="", config={"config": _config(tree)}, layers=(layer,), size_bytes=size
    )


def _members(tree: Path) -> Iterator[tuple[Member, Content | None]]:
    first: dict[tuple[int, int], str] = {}
    for path, name, info in walk(tree):
        member = Member(name, Kind.FILE, stat.S_IMODE(info.st_mode), mtime=int(info.st_mtime))
        if stat.S_ISDIR(info.st_mode):
            member.kind = Kind.DIRECTORY
        elif stat.S_ISLNK(info.st_mode):
            member.kind, member.link, member.mode = Kind.SYMLINK, str(path.readlink()), 0o777
        elif not stat.S_ISREG(info.st_mode):
            member.kind = Kind.FIFO
        elif info.st_nlink > 1 and (known := first.setdefault((info.st_dev, info.st_ino), name)) != name:
            member.kind, member.link = Kind.HARD_LINK, known
        else:
            member.size = info.st_size
            with path.open("rb") as stream:
                yield member, Content(info.st_size, _pieces(stream))
            continue
        yield member, None


def _pieces(stream: BinaryIO) -> Iterator[memoryview]:
    while piece := stream.read(PIECE_BYTES):
        yield memoryview(piece)


def _config(tree: Path) -> dict[str, object]:
    """Variables and labels from the files that enroot writes."""
    variables = [line for line in _lines(tree / "etc/environment") if "=" in line]
    labels = [match for line in _lines(tree / "etc/rc") if (match := _LABEL.match(line))]
    return {
        "Env": variables,
        "Labels": {item["name"]: item["value"] for item in labels if not item["name"].endswith(":")},
    }


def _lines(file: Path) -> list[str]:
    # A link would be followed out of the tree.
    if file.is_symlink() or not file.is_file():
        return []
    return file.read_text(encoding="utf-8", errors="replace").splitlines()
