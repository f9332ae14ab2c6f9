"""Artifacts: manifests that hold one file and refer to an image (OCI image-spec 1.1, manifest.md, `subject`)."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.core.digests import Json, canonical_json, sha256_bytes
from envbuild.oci.models import MANIFEST_TYPE

EMPTY = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
# image-spec 1.1, manifest.md, "Guidance for an Empty Descriptor".
EMPTY_DESCRIPTOR: dict[str, Json] = {
    "mediaType": EMPTY_TYPE,
    "digest": sha256_bytes(EMPTY),
    "size": len(EMPTY),
    # EMPTY itself, in base64.
    "data": "e30=",
}
TITLE = "org.opencontainers.image.title"
CREATED = "org.opencontainers.image.created"


def file_descriptor(media_type: str, digest: str, size_bytes: int, title: str) -> dict[str, Json]:
    """What an artifact states about its file."""
    return {"mediaType": media_type, "digest": digest, "size": size_bytes, "annotations": {TITLE: title}}


def artifact_manifest(
    artifact_type: str, file: Mapping[str, Json], subject: Mapping[str, Json] | None, annotations: Mapping[str, str]
) -> bytes:
    """The manifest of an artifact.

    Args:
        file: see :func:`file_descriptor`.
        subject: the descriptor of the manifest that it is about.
    """
    fields: dict[str, Json] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": artifact_type,
        "config": EMPTY_DESCRIPTOR,
        "layers": [dict(file)],
        "annotations": dict(annotations),
    }
    return canonical_json(fields if subject is None else {**fields, "subject": dict(subject)})


def artifact_entry(manifest: bytes, artifact_type: str, annotations: Mapping[str, str]) -> dict[str, Json]:
    """What an index states about an artifact."""
    return {
        "mediaType": MANIFEST_TYPE,
        "digest": sha256_bytes(manifest),
        "size": len(manifest),
        "artifactType": artifact_type,
        "annotations": dict(annotations),
    }
