"""The merged image as enroot lays it out, written as a tar for mksquashfs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from envbuild.image.squashfs import enroot
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.members import Kind, Member, tidy_name
from envbuild.rootfs.overlay import Overlay, Places, merged
from envbuild.rootfs.stream import Content
from envbuild.rootfs.tar_writer import Sink, end, write_member


class DuplicateMemberError(Exception):
    """A layer has a file twice; the last holds, and mksquashfs would keep the first."""


def write_stream(
    sink: Sink,
    layers: Sequence[LayerBlob],
    extra: Mapping[str, bytes],
    workdir: str,
    epoch: int,
    superseded: Places = (),
) -> None:
    """Write one tar with the content of ``layers`` (lowest first) as enroot would lay it out, and ``extra`` files.

    mksquashfs takes a directory's attributes whenever they come.

    Raises:
        DuplicateMemberError: ``superseded`` is needed.
        CheckRefusedError: a layer is refused.
    """
    for name, data in extra.items():
        parts: Iterator[memoryview] = iter([memoryview(data)] if data else [])
        member = Member(name, Kind.FILE, 0o644, mtime=epoch, size=len(data))
        write_member(sink, member, Content(len(data), parts))
    folders = [folder] if (folder := tidy_name(workdir, absolute=True)) else []
    overlay = Overlay(files=extra.keys(), emptied=enroot.EMPTIED, folders=folders, mtime=epoch)
    # Hard links come after their file: mksquashfs 4.5 crashes on one that comes before it.
    for member, content in merged(layers, overlay, superseded):
        if member.replaces:
            raise DuplicateMemberError
        member.uid = member.gid = 0
        member.mode = enroot.mode(member.mode, directory=member.kind is Kind.DIRECTORY)
        write_member(sink, member, content)
    end(sink)
