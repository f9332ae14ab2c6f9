"""The OCI image: its configuration, its manifest and the layout directory (OCI image-spec 1.0)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from envbuild.core.digests import Json, canonical_json, sha256_bytes
from envbuild.core.files import link_or_copy, write_atomic
from envbuild.oci.models import (
    CONFIG_TYPE,
    DOCKER_MANIFEST_TYPE,
    INDEX_FILE,
    LAYER_TYPES,
    MANIFEST_TYPE,
    REF_NAME,
    Manifest,
    RunConfig,
    not_an_image,
    read,
)
from envbuild.rootfs.layer import Layer, LayerRecord


@dataclass(frozen=True, kw_only=True)
class OciImage:
    """An image's configuration and manifest as bytes; the layers are files."""

    config: bytes
    manifest: bytes

    @property
    def config_digest(self) -> str:
        return sha256_bytes(self.config)

    @property
    def digest(self) -> str:
        """The digest by which the image is known: that of its manifest."""
        return sha256_bytes(self.manifest)


# What the history states about a layer, before its name.
LAYER_OF = "envbuild: "


def make_oci(
    run_config: RunConfig,
    platform: str,
    layers: Sequence[LayerRecord],
    epoch: int,
    annotations: Mapping[str, str] | None = None,
) -> OciImage:
    """The image of ``layers`` (lowest first), created at ``epoch``.

    Args:
        annotations: of its manifest, besides the labels.
    """
    system, architecture = platform.split("/")
    created = datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    config: dict[str, Json] = {
        "architecture": architecture,
        "os": system,
        "created": created,
        "config": run_config.as_json(),
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        # A step for each layer: the names of layers are read back from here (Configuration.layer_name, base.as_image).
        "history": [{"created": created, "created_by": f"{LAYER_OF}{layer.name}"} for layer in layers],
    }
    # Keys sorted, no blanks: the digests depend on the bytes.
    raw = canonical_json(config)
    manifest: dict[str, Json] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": sha256_bytes(raw), "size": len(raw)},
        "layers": [
            {"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size_bytes} for layer in layers
        ],
        "annotations": {"org.opencontainers.image.created": created, **dict(run_config.labels), **(annotations or {})},
    }
    return OciImage(config=raw, manifest=canonical_json(manifest))


def write_layout(folder: Path, image: OciImage, layers: Sequence[Layer], tag: str) -> None:
    """Write an image as an OCI layout: blobs by digest (layers as hard links), ``index.json``, ``oci-layout``."""
    blobs = folder / "blobs/sha256"
    for layer in layers:
        link_or_copy(layer.file, blobs / layer.record.digest.removeprefix("sha256:"))
    write_documents(folder, image, tag)


def write_documents(folder: Path, image: OciImage, tag: str) -> None:
    """Write what a layout has besides its layers."""
    for data in (image.config, image.manifest):
        write_atomic(folder / "blobs/sha256" / sha256_bytes(data).removeprefix("sha256:"), data)
    config = json.loads(image.config)
    index: dict[str, Json] = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": MANIFEST_TYPE,
                "digest": image.digest,
                "size": len(image.manifest),
                "platform": {"os": config["os"], "architecture": config["architecture"]},
                "annotations": {REF_NAME: tag},
            }
        ],
    }
    write_atomic(folder / INDEX_FILE, canonical_json(index))
    write_atomic(folder / "oci-layout", canonical_json({"imageLayoutVersion": "1.0.0"}))


def retagged(index: bytes, tag: str) -> bytes:
    """The ``index.json`` of a layout with one image, which has another tag in it."""
    value = json.loads(index)
    for described in value["manifests"]:
        if REF_NAME in described.get("annotations", {}):  # what refers to the image has none
            described["annotations"][REF_NAME] = tag
    return canonical_json(value)


_DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER_TYPES = {oci: docker for docker, oci in LAYER_TYPES.items() if docker != oci}


def docker_manifest(manifest: bytes) -> bytes:
    """Docker's manifest of an image, for registries and clients that know no OCI manifests.

    It names the same blobs as the OCI manifest, so nothing is sent twice, and has a digest of its own. Format:
    https://distribution.github.io/distribution/spec/manifest-v2-2/ (image manifest version 2, schema 2).

    Raises:
        CheckRefusedError: it is not the manifest of an image.
    """
    document = read(manifest, Manifest, "an OCI manifest", not_an_image)
    layers: list[Json] = [
        {
            "mediaType": _LAYER_TYPES.get(layer.media_type, layer.media_type),
            "digest": layer.digest,
            "size": layer.size_bytes,
        }
        for layer in document.layers
    ]
    return canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": DOCKER_MANIFEST_TYPE,
            # The configuration of an OCI image is one of docker's (image-spec, config.md): it has the same keys.
            "config": {
                "mediaType": _DOCKER_CONFIG,
                "digest": document.config.digest,
                "size": document.config.size_bytes,
            },
            "layers": layers,
        }
    )
