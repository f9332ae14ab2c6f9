"""Layers straight from tarfile, so that they can hold what no builder of ours would write."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from envbuild.core.digests import sha256_file
from envbuild.oci.models import RunConfig
from envbuild.oci.write import OciImage, make_oci, write_layout
from envbuild.rootfs.blobs import LayerBlob
from envbuild.rootfs.layer import Layer, LayerRecord
from envbuild.rootfs.overlay import merged

EPOCH = 1_600_000_000
Item = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **attributes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode, member.mtime = kind, link, 0o644, EPOCH
    for key, value in attributes.items():
        setattr(member, key, value)
    return member


def file(name: str, data: bytes = b"", **attributes) -> Item:
    return entry(name, **attributes), data


def folder(name: str, mode: int = 0o755, **attributes) -> Item:
    return entry(name, tarfile.DIRTYPE, mode=mode, **attributes)


def symlink(name: str, link: str) -> Item:
    return entry(name, tarfile.SYMTYPE, link, mode=0o777)


def hard_link(name: str, link: str) -> Item:
    return entry(name, tarfile.LNKTYPE, link)


def fifo(name: str) -> Item:
    return entry(name, tarfile.FIFOTYPE)


def device(name: str) -> Item:
    return entry(name, tarfile.CHRTYPE, devmajor=1, devminor=3)


def tar_of(items: Iterable[Item], form: int = tarfile.GNU_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form, errors="surrogateescape", encoding="utf-8") as tar:
        for item in items:
            member, data = item if isinstance(item, tuple) else (item, b"")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def layer(folder: Path, *items: Item, **known) -> LayerBlob:
    """A gzipped layer of these members in ``folder``."""
    path = folder / f"layer{len(list(folder.iterdir()))}.tar.gz"
    path.write_bytes(gzip.compress(tar_of(items), 1, mtime=0))
    return LayerBlob(file=path, **known)


def layout_of(
    folder: Path, *items: Item, config: RunConfig | None = None, tag: str = "mcore", name: str = "base"
) -> tuple[OciImage, LayerRecord]:
    """Write an OCI layout of an image with one layer to ``folder/oci``."""
    blob = layer(folder, *items)
    digest, size = sha256_file(blob.file), blob.file.stat().st_size
    record = LayerRecord(name="base", digest=digest, diff_id="sha256:d", size_bytes=size, unpacked_bytes=1, entries=1)
    record = record.model_copy(update={"name": name})  # a record of others may have any name
    image = make_oci(config or RunConfig(), "linux/amd64", [record], 0)
    write_layout(folder / "oci", image, [Layer(record, blob.file)], tag=tag)
    blob.file.unlink()
    return image, record


def seen(*layers: LayerBlob, **options) -> dict[str, str]:
    """What is merged of layers, lowest first: by name the content, ``-> link``, ``= hard link`` or the kind."""
    found: dict[str, str] = {}
    for member, content in merged(layers, **options):
        assert member.name not in found or member.replaces, f"{member.name} comes twice"
        if member.kind.value == "hard link":
            assert member.link in found, "a hard link before its file"
        marks = {"symbolic link": f"-> {member.link}", "hard link": f"= {member.link}"}
        text = content.read().decode(errors="replace") if content else ""
        found[member.name] = marks.get(member.kind.value) or (text if content else f"({member.kind.value})")
    return found


def read_members(archive: Path) -> Iterator[tuple[tarfile.TarInfo, BinaryIO | None]]:
    """The members of a tar as Python's tarfile has them; for files also their content, to be read at once."""
    with tarfile.open(archive, "r:*", encoding="utf-8", errors="surrogateescape") as tar:
        for member in tar:
            yield member, cast("BinaryIO", tar.extractfile(member)) if member.isreg() else None
