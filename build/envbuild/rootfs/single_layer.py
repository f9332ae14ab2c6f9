"""One layer by itself: what it ships, whatever other layers hide of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from envbuild.rootfs.blobs import LayerBlob, open_blob
from envbuild.rootfs.members import Member, Refusal, refused
from envbuild.rootfs.stream import Content
from envbuild.rootfs.tar_reader import read_tar


def members_of(blob: LayerBlob) -> Iterator[tuple[Member, Content | None]]:
    """The members of a layer in their order, whiteouts among them; content must be read before the next one.

    Raises:
        CheckRefusedError: it is damaged, is not the one that was asked for, or holds what no layer may.
        MachineError: it cannot be read.
    """
    with contextlib.closing(open_blob(blob)) as pieces, _refusing(blob):
        for member, content in read_tar(pieces, blob.limit_bytes):
            yield member, content and content.guarded(_refusing(blob))


@contextlib.contextmanager
def _refusing(blob: LayerBlob) -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        raise refused(blob.title, refusal) from refusal
