"""The merged image as enroot lays it out, written as a tar for mksquashfs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from envbuild.core.errors import CheckRefusedError
from envbuild.image.squashfs import enroot
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.members import Kind, Member, shown, tidy_name
from envbuild.rootfs.overlay import Overlay, Places, merged
from envbuild.rootfs.stream import Content
from envbuild.rootfs.tar_writer import Sink, end, write_member

# A runtime mounts over these when the container starts.
_MOUNTED = ("dev", "proc", "run", "sys", "tmp")
# The most that Linux follows in one path.
MAX_LINKS = 40


class DirectoryIndex:
    """The directories and links of an image, noted while it is merged."""

    def __init__(self) -> None:
        self._folders: set[str] = set()
        self._links: dict[str, str] = {}

    def see(self, member: Member) -> None:
        if member.kind is Kind.DIRECTORY:
            self._folders.add(member.name)
        elif member.kind is Kind.SYMLINK:
            self._links[member.name] = member.link
        # A hard link to a symbolic link is that link.
        elif member.kind is Kind.HARD_LINK and member.link in self._links:
            self._links[member.name] = self._links[member.link]

    def check(self, workdir: str) -> None:
        """Refuse a working directory that is not a directory; one that is missing behind a link may still be made.

        Raises:
            CheckRefusedError: a file or a link that leads nowhere is in the way.
        """
        own, linked = _parts(workdir), list[str]()
        place, followed = "", 0
        while linked or own:
            is_own = not linked
            part = own.pop() if is_own else linked.pop()
            if part == "..":
                place = place.rpartition("/")[0]
                continue
            name = f"{place}/{part}".lstrip("/")
            if name in self._links and followed < MAX_LINKS:
                text = self._links[name]
                linked += _parts(text)
                place, followed = "" if text.startswith("/") else place, followed + 1
            elif name in self._folders:
                place = name
            elif name.partition("/")[0] in _MOUNTED or (is_own and followed):
                return
            else:
                raise _refused(workdir, name, followed)


def _parts(path: str) -> list[str]:
    """The parts of a path, the first one last."""
    return [part for part in path.split("/") if part not in ("", ".")][::-1]


def _refused(workdir: str, name: str, followed: int) -> CheckRefusedError:
    leads = f"It leads to {shown('/' + name)}, which is not a directory of the image" if followed else ""
    return CheckRefusedError(
        f"the image's working directory {shown(workdir)} is not a directory",
        why=(leads or f"{shown('/' + name)} is in the image, and is not a directory") + ". No container would start.",
        fix="Give the image (or its base) another WORKDIR, or put a directory there.",
    )


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
