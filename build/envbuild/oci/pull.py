"""Takes an image as a base: finds it by its digest, and gets its layers into the store, each checked and kept once."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.models import TomlModel
from envbuild.core import jsonread
from envbuild.core.digests import sha256_bytes, short
from envbuild.core.files import link_or_copy, write_atomic
from envbuild.core.progress import Reporter
from envbuild.oci.models import (
    LAYER_TYPES,
    BaseConfig,
    Configuration,
    Descriptor,
    Index,
    Manifest,
    base_config,
    check_layers,
    choose,
    read,
    refused,
)
from envbuild.oci.sources import ImageSource
from envbuild.rootfs import members
from envbuild.rootfs.blobs import LayerBlob, check_media_type, open_blob
from envbuild.rootfs.layer import Layer, LayerRecord
from envbuild.rootfs.members import Refusal
from envbuild.rootfs.tar_reader import read_tar
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, dump, load

KIND = "base-layers"
BLOB = "layer"


class LayerContent(TomlModel):
    """What is in a layer's file."""

    diff_id: str
    unpacked_bytes: int
    entries: int


@dataclass(frozen=True, kw_only=True)
class FoundImage:
    """An image whose documents were read and checked; its layers with the digests of the tars in them."""

    name: str
    digest: str
    config: BaseConfig
    layers: tuple[tuple[Descriptor, str], ...]


def find_image(source: ImageSource, digest: str, platform: str) -> FoundImage:
    """The image of a digest, or of the entry for a platform where the digest is that of an index.

    Raises:
        CheckRefusedError: it is damaged, for another platform, or has layers that cannot be taken.
        NetworkError: a registry cannot be reached, or does not have it.
    """
    raw = _document(source, digest, manifest=True)
    if _is_index(raw):
        chosen = choose(read(raw, Index, source.name), platform, source.name)
        digest = chosen.digest
        raw = _document(source, digest, manifest=True)
    manifest = read(raw, Manifest, source.name)
    configuration = read(_document(source, manifest.config.digest, manifest=False), Configuration, source.name)
    check_layers(manifest, configuration, platform, source.name)
    return FoundImage(
        name=source.name,
        digest=digest,
        config=base_config(configuration, source.name),
        layers=tuple(zip(manifest.layers, configuration.rootfs.diff_ids, strict=True)),
    )


def _is_index(raw: bytes) -> bool:
    try:
        return "manifests" in jsonread.foreign(raw)
    except (ValueError, TypeError):
        return False  # said better by who reads it as a manifest


def _document(source: ImageSource, digest: str, *, manifest: bool) -> bytes:
    raw = source.document(digest, manifest=manifest)
    if sha256_bytes(raw) != digest:
        raise refused(
            source.name,
            f"What is there as {digest} has the digest {sha256_bytes(raw)}.",
            "It was damaged or replaced there: get it from where it was made.",
        )
    return raw


def keep_layers(
    source: ImageSource, image: FoundImage, store: LocalStore, into: Path, reporter: Reporter
) -> list[Layer]:
    """The layers of an image in ``into``, hard links into the store where it has them once for all bases.

    Raises:
        CheckRefusedError: a layer is not the one that the manifest or the configuration states.
        NetworkError: a registry cannot be reached, or does not have one.
    """
    kept = []
    for number, (descriptor, diff_id) in enumerate(image.layers, 1):
        title = f"layer {number} of {len(image.layers)}, {short(descriptor.digest)}, {descriptor.size_bytes} bytes"
        with reporter.step(title):
            file, content = _keep(source, descriptor, store)
        if content.diff_id != diff_id:
            raise refused(
                image.name,
                f"The tar in its layer {descriptor.digest} is {content.diff_id}; its configuration states {diff_id}.",
            )
        place = into / f"{number}"
        link_or_copy(file, place)
        record = LayerRecord(
            name=f"base-{number}" if len(image.layers) > 1 else "base",
            digest=descriptor.digest,
            diff_id=diff_id,
            size_bytes=descriptor.size_bytes,
            unpacked_bytes=content.unpacked_bytes,
            entries=content.entries,
            media_type=LAYER_TYPES[descriptor.media_type],
        )
        kept.append(Layer(record, place))
    return kept


def _keep(source: ImageSource, descriptor: Descriptor, store: LocalStore) -> tuple[Path, LayerContent]:
    def fetch(folder: Path) -> None:
        file = folder / BLOB
        source.fetch(descriptor, file)
        write_atomic(folder / RECORD_FILE, dump(content_of(file, descriptor)))

    entry = store.get_or_build(KIND, descriptor.digest, fetch)
    # Kept by its digest: another image may have it under another media type.
    check_media_type(_blob(entry.path / BLOB, descriptor))
    return entry.path / BLOB, load(entry.path / RECORD_FILE, LayerContent)


def _blob(file: Path, descriptor: Descriptor) -> LayerBlob:
    return LayerBlob(
        file=file, digest=descriptor.digest, size_bytes=descriptor.size_bytes, media_type=descriptor.media_type
    )


def content_of(file: Path, descriptor: Descriptor | None = None, called: str = "") -> LayerContent:
    """Read a layer whole: its members are well-formed, and its size, digest and packing are those that are stated.

    Args:
        called: what errors call it, where it has no descriptor.

    Raises:
        CheckRefusedError: they are not.
    """
    blob = _blob(file, descriptor) if descriptor else LayerBlob(file=file, called=called)
    plain, count = hashlib.sha256(), 0

    def seen() -> Iterator[bytes]:
        nonlocal count
        with contextlib.closing(open_blob(blob)) as pieces:
            for piece in pieces:
                plain.update(piece)
                count += len(piece)
                yield piece

    entries, pieces = 0, seen()
    try:
        for _ in read_tar(pieces, blob.limit_bytes):
            entries += 1
    except Refusal as refusal:
        for _ in pieces:
            pass  # if it is not the one that was asked for, that is the error
        raise members.refused(blob.title, refusal) from refusal
    for _ in pieces:
        pass  # the digests are compared at the end
    return LayerContent(diff_id=f"sha256:{plain.hexdigest()}", unpacked_bytes=count, entries=entries)
