"""Docker's manifest of an image, for registries and clients that know no OCI manifests.

Format: https://distribution.github.io/distribution/spec/manifest-v2-2/ (image manifest version 2, schema 2). It names
the same blobs as the OCI manifest, so nothing is sent twice, and has a digest of its own.
"""

from __future__ import annotations

from envbuild.core.digests import Json, canonical_json
from envbuild.oci.models import DOCKER_MANIFEST_TYPE, LAYER_TYPES, Manifest, not_an_image, read

CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
_LAYER_TYPES = {oci: docker for docker, oci in LAYER_TYPES.items() if docker != oci}


def docker_manifest(manifest: bytes) -> bytes:
    """The docker manifest of the image that an OCI manifest describes; the same one for the same bytes.

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
            "config": {"mediaType": CONFIG_TYPE, "digest": document.config.digest, "size": document.config.size_bytes},
            "layers": layers,
        }
    )
