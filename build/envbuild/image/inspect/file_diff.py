"""Every difference of the files of two images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from envbuild.core.digests import Json
from envbuild.core.text import printable
from envbuild.oci.layout import Image
from envbuild.rootfs.members import Kind, Member, name_bytes
from envbuild.rootfs.overlay import merged
from envbuild.rootfs.stream import Content


class _Properties(NamedTuple):
    """What is compared of a name; hard links have what their file has, and no link."""

    kind: str
    content: str
    mode: str
    owner: str
    link: str
    xattrs: str
    mtime: str


@dataclass(frozen=True, kw_only=True)
class FileDifference:
    """A name that is not the same in two images.

    Attributes:
        what: ``added``, ``removed`` or ``changed``; ``fields``: of what changed, old and new value.
    """

    path: str
    what: str
    fields: dict[str, tuple[str, str]]

    def as_json(self) -> dict[str, Json]:
        return {"path": self.path, "what": self.what, "fields": {**self.fields}}

    def line(self) -> str:
        changes = ", ".join(
            f"{name} {printable(old) or '-'} -> {printable(new) or '-'}" for name, (old, new) in self.fields.items()
        )
        return f"{self.what}: {printable(self.path)}" + (f"  {changes}" if changes else "")


def different_files(old: Image, new: Image, *, times: bool) -> Iterator[FileDifference]:
    """What differs between the files that containers of two images see, sorted by the names' bytes.

    Args:
        times: whether a time alone makes a difference.

    Raises:
        CheckRefusedError: a layer of either is damaged, or holds what no layer may.
    """
    before, after = _properties(old), _properties(new)
    fields = _Properties._fields if times else _Properties._fields[:-1]
    for name in sorted({*before, *after}, key=name_bytes):
        was, now = before.get(name), after.get(name)
        changed: dict[str, tuple[str, str]] = {}
        if was and now:
            changed = {
                field: (first, second)
                for field, first, second in zip(fields, was, now, strict=False)  # mtime is the last, or left out
                if first != second
            }
            if not changed:
                continue
        what = "added" if was is None else "removed" if now is None else "changed"
        yield FileDifference(path=f"/{name}", what=what, fields=changed)


def _properties(image: Image) -> dict[str, _Properties]:
    """What a container of the image sees, by name."""
    seen: dict[str, _Properties] = {}
    links: dict[str, str] = {}
    for member, content in _members(image):
        if member.kind is Kind.HARD_LINK:
            links[member.name] = member.link
        # Without the root itself: many layers have no entry for it. Where a layer has a file twice, `merged` yields it
        # again, and the last one holds.
        elif member.name:
            seen[member.name] = _of_member(member, content)
    # Which of the names of a file is the link is no difference.
    return seen | {name: seen[target] for name, target in links.items()}


def _members(image: Image) -> Iterator[tuple[Member, Content | None]]:
    blobs = [layer.blob for layer in image.layers if layer.blob is not None]
    if len(blobs) == len(image.layers):
        yield from merged(blobs)
    else:
        # A .sqsh is not a tar: its one layer is all that a container sees.
        for layer in image.layers:
            yield from layer.members()


def _of_member(member: Member, content: Content | None) -> _Properties:
    digest = ""
    if content is not None:
        sha256 = hashlib.sha256()
        for piece in content.pieces():
            sha256.update(piece)
        digest = f"sha256:{sha256.hexdigest()}"
    return _Properties(
        kind=member.kind.value,
        content=digest,
        # The mode of a symbolic link means nothing, and builders write what they like.
        mode="" if member.kind is Kind.SYMLINK else f"{member.mode:04o}",
        owner=f"{member.uid}:{member.gid}",
        link=member.link,
        xattrs=",".join(member.xattrs),
        mtime=str(member.mtime),
    )
