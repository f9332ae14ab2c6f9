"""The merged image as enroot lays it out, written as a tar for mksquashfs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from envbuild.image.squashfs import enroot
from envbuild.image.squashfs.workdir import DirectoryIndex
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.members import Kind, Member, tidy_name
from envbuild.rootfs.overlay import Overlay, Places, merged
from envbuild.rootfs.stream import Content
from envbuild.rootfs.tar_writer import Sink, end, write_member

# The second where /bin is a link to usr/bin, as in current distributions.
_SHELLS = ("bin/sh", "usr/bin/sh")


class DuplicateMemberError(Exception):
    """A layer has a file twice; the last holds, and mksquashfs would keep the first."""


def write_stream(
    sink: Sink,
    layers: Sequence[LayerBlob],
    extra: Mapping[str, bytes],
    workdir: str,
    epoch: int,
    superseded: Places = (),
) -> str:
    """Write one tar with the content of ``layers`` (lowest first) as enroot would lay it out, and ``extra`` files.

    mksquashfs takes a directory's attributes whenever they come.

    Returns:
        The target of the image's link /bin/sh; empty when it is not a link.

    Raises:
        DuplicateMemberError: ``superseded`` is needed.
        CheckRefusedError: a layer is refused, or no container could change into ``workdir``.
    """
    for name, data in extra.items():
        parts: Iterator[memoryview] = iter([memoryview(data)] if data else [])
        member = Member(name, Kind.FILE, 0o644, mtime=epoch, size=len(data))
        write_member(sink, member, Content(len(data), parts))
    folders = [folder] if (folder := tidy_name(workdir, absolute=True)) else []
    overlay = Overlay(files=extra.keys(), emptied=enroot.EMPTIED, folders=folders, mtime=epoch)
    shell, names = "", DirectoryIndex()
    # Hard links come after their file: mksquashfs 4.5 crashes on one that comes before it.
    for member, content in merged(layers, overlay, superseded):
        if member.replaces:
            raise DuplicateMemberError
        names.see(member)
        if member.name in _SHELLS:
            shell = member.link
        member.uid = member.gid = 0
        member.mode = enroot.mode(member.mode, directory=member.kind is Kind.DIRECTORY)
        write_member(sink, member, content)
    # At the end: the directory may be in any layer.
    names.check(workdir)
    end(sink)
    return shell
