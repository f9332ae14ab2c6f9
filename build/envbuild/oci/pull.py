"""Takes an image as a base: finds it by its digest, and gets its layers into the store, each checked and kept once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.core import jsonread
from envbuild.core.digests import sha256_bytes, short
from envbuild.core.errors import CheckRefusedError
from envbuild.core.files import link_or_copy, write_atomic
from envbuild.oci.files import ImageSource
from envbuild.oci.models import (
    LAYER_TYPES,
    BaseConfig,
    Configuration,
    Descriptor,
    Index,
    Manifest,
    read,
    refused_as_base,
)
from envbuild.rootfs.blobs import LayerBlob, check_media_type
from envbuild.rootfs.layer import Layer, LayerRecord
from envbuild.rootfs.single_layer import LayerContent, content_of
from envbuild.store.local import LocalStore
from envbuild.store.record import RECORD_FILE, dump, load

KIND = "base-layers"
BLOB = "layer"


@dataclass(frozen=True, kw_only=True)
class FoundImage:
    """An image whose documents were read and checked; its layers with the digests of the tars in them.

    Attributes:
        history: what it states about each layer, lowest first.
        annotations: of its manifest.
    """

    name: str
    digest: str
    config: BaseConfig
    layers: tuple[tuple[Descriptor, str], ...]
    history: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)


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
        history=tuple(map(configuration.layer_name, range(len(manifest.layers)))),
        annotations=manifest.annotations,
    )


def _is_index(raw: bytes) -> bool:
    try:
        # By its content: mediaType is optional in both (image-spec, manifest.md), and blobs of a layout come without a
        # header.
        return "manifests" in jsonread.foreign(raw)
    except (ValueError, TypeError):
        return False  # reading it as a manifest gives the better error


def _document(source: ImageSource, digest: str, *, manifest: bool) -> bytes:
    raw = source.document(digest, manifest=manifest)
    if sha256_bytes(raw) != digest:
        raise refused_as_base(
            source.name,
            f"What is there as {digest} has the digest {sha256_bytes(raw)}.",
            "It was damaged or replaced there: get it from where it was made.",
        )
    return raw


def choose(index: Index, platform: str, name: str) -> Descriptor:
    """The image for a platform.

    Raises:
        CheckRefusedError: there is none.
    """
    for entry in index.manifests:
        # image-spec, image-index.md: of several entries that match, the first should be used.
        if entry.platform is not None and entry.platform.is_for(platform):
            return entry
    known = sorted({str(entry.platform) for entry in index.manifests if entry.platform and entry.platform.os})
    raise _other_platform(name, platform, ", ".join(known) or "no platform that it names")


def _other_platform(name: str, platform: str, offered: str) -> CheckRefusedError:
    fix = "Correct the base's platform, or choose an image that is made for it."
    return refused_as_base(name, f"The base is for {platform}; the image is for {offered}.", fix)


def check_layers(manifest: Manifest, configuration: Configuration, platform: str, name: str) -> None:
    """Refuse an image for another platform, and layers that cannot be taken.

    Raises:
        CheckRefusedError: it is for another platform, or a layer is of a foreign or unknown type.
    """
    if not configuration.platform.is_for(platform):
        raise _other_platform(name, platform, str(configuration.platform))
    for layer in manifest.layers:
        # Base layers of Windows, for the most part (image-spec, layer.md, "Non-Distributable Layers").
        if any(f".{word}." in layer.media_type for word in ("foreign", "nondistributable")):
            raise refused_as_base(
                name,
                f"Its layer {layer.digest} is a foreign one ({layer.media_type}): no registry holds it, and its "
                "licence forbids to hand it on, as every image on this base would.",
                "Use an image whose layers are all its registry's own.",
            )
        if layer.media_type not in LAYER_TYPES:
            raise refused_as_base(name, f"Its layer {layer.digest} is of the unknown type {layer.media_type!r}.")
    count = len(configuration.rootfs.diff_ids)
    if not count:
        raise refused_as_base(name, "It has no layers.")
    if count != len(manifest.layers):
        raise refused_as_base(name, f"Its manifest has {len(manifest.layers)} layers, and its configuration {count}.")


def base_config(configuration: Configuration, name: str) -> BaseConfig:
    """How containers of an image start.

    Raises:
        CheckRefusedError: a variable cannot be written into the files that containers read.
    """
    run = configuration.run
    environment = {}
    for entry in run.environment:
        variable, equals, value = entry.partition("=")
        # enroot's /etc/environment has a variable a line.
        if not equals or not variable or any(character in entry for character in "\n\r\0"):
            raise refused_as_base(name, f"Its variable {variable[:80]!r} has no value, no name, or a line break in it.")
        environment[variable] = value
    for word in (run.workdir, run.user, run.stop_signal, *run.volumes, *run.ports):
        if any(character in word for character in "\n\r\0"):
            raise refused_as_base(name, f"Its configuration has a line break in {word[:80]!r}.")
    return BaseConfig(
        environment=environment,
        labels=dict(run.labels),
        user=run.user,
        workdir=run.workdir,
        volumes=run.volumes,
        ports=run.ports,
        stop_signal=run.stop_signal,
        entrypoint=run.entrypoint,
    )


def keep_layers(source: ImageSource, image: FoundImage, store: LocalStore, into: Path) -> list[Layer]:
    """The layers of an image in ``into``, hard links into the store where it has them once for all bases.

    Raises:
        CheckRefusedError: a layer is not the one that the manifest or the configuration states.
        NetworkError: a registry cannot be reached, or does not have one.
    """
    kept = []
    for number, (descriptor, diff_id) in enumerate(image.layers, 1):
        title = f"layer {number} of {len(image.layers)}, {short(descriptor.digest)}, {descriptor.size_bytes} bytes"
        with store.reporter.step(title):
            file, content = _keep(source, descriptor, store)
        # The manifest's digest does not cover the tar in a layer: docker compares it too, when it unpacks.
        if content.diff_id != diff_id:
            raise refused_as_base(
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
        write_atomic(folder / RECORD_FILE, dump(content_of(_blob(file, descriptor))))

    entry = store.get_or_build(KIND, descriptor.digest, fetch)
    # Kept by its digest: another image may have it under another media type.
    check_media_type(_blob(entry.path / BLOB, descriptor))
    return entry.path / BLOB, load(entry.path / RECORD_FILE, LayerContent)


def _blob(file: Path, descriptor: Descriptor) -> LayerBlob:
    return LayerBlob(
        file=file, digest=descriptor.digest, size_bytes=descriptor.size_bytes, media_type=descriptor.media_type
    )
