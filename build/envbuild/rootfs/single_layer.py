"""One layer by itself: what it ships, whatever other layers hide of it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

from envbuild.catalog.fields import TomlModel
from envbuild.rootfs.blobs import LayerBlob, open_blob
from envbuild.rootfs.members import Member, refusals
from envbuild.rootfs.stream import Content
from envbuild.rootfs.tar_reader import read_tar


class LayerContent(TomlModel):
    """What is in a layer's file."""

    diff_id: str
    unpacked_bytes: int
    entries: int


def members_of(blob: LayerBlob) -> Iterator[tuple[Member, Content | None]]:
    """The members of a layer in their order, whiteouts among them; content must be read before the next one.

    Raises:
        CheckRefusedError: it is damaged, is another one than stated, or holds what no layer may.
        MachineError: it cannot be read.
    """
    with contextlib.closing(open_blob(blob)) as pieces, refusals(blob.title, pieces):
        for member, content in read_tar(pieces):
            yield member, content and content.guarded(refusals(blob.title, pieces))


def content_of(blob: LayerBlob) -> LayerContent:
    """Read a layer whole: its members are well-formed, and its size, digest and packing are those that are stated.

    Raises:
        CheckRefusedError: they are not.
    """
    plain, count, entries = hashlib.sha256(), 0, 0

    def counted(pieces: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal count
        for piece in pieces:
            plain.update(piece)
            count += len(piece)
            yield piece

    with contextlib.closing(open_blob(blob)) as pieces, refusals(blob.title, pieces):
        # No content is asked for: the reader passes over it on the way to the next header, and so it is hashed as well.
        for _ in read_tar(counted(pieces)):
            entries += 1
    return LayerContent(diff_id=f"sha256:{plain.hexdigest()}", unpacked_bytes=count, entries=entries)
