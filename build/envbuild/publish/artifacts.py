"""Artifacts attached to a published image: its reports, its certificate as a sigstore bundle, its .sqsh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.certify.certificate.envelope import decode
from envbuild.certify.certificate.sign import Signer
from envbuild.core.digests import Json, sha256_bytes
from envbuild.core.files import write_atomic
from envbuild.image.output import OCI_DIR, PlacedImage
from envbuild.image.record import BaseRecord
from envbuild.lock.record.content import timestamp
from envbuild.oci.artifact import CREATED, EMPTY, TITLE, artifact_manifest, file_descriptor
from envbuild.oci.files import FolderFiles, blob_path
from envbuild.oci.models import MANIFEST_TYPE
from envbuild.oci.push import Blob
from envbuild.publish.bundle import BUNDLE_TYPE, Bundle, make_bundle, result_bundle
from envbuild.publish.gate import Admitted
from envbuild.publish.models import PublishedSqsh
from envbuild.store.record import RECORD_FILE, dump

SQSH_TYPE = "application/x-squashfs"
# The record of a base: what it was made by, and its packages.
BASE_TYPE = "application/vnd.envbuild.base.v2+json"


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A file that is attached to the image, and the manifest that attaches it."""

    artifact_type: str
    manifest: bytes
    blob: Blob


def image_blobs(image: PlacedImage) -> tuple[bytes, tuple[Blob, ...]]:
    """The manifest of an image, and its configuration and layers as blobs."""
    layout = FolderFiles(image.path / OCI_DIR)
    record = image.record
    manifest = layout.read(blob_path(record.oci_digest))
    config = layout.file(blob_path(record.config_digest))
    sizes = {record.config_digest: config.stat().st_size}
    sizes |= {layer.digest: layer.size_bytes for layer in record.layers}
    return manifest, tuple(
        Blob(digest=digest, size_bytes=size, file=layout.file(blob_path(digest))) for digest, size in sizes.items()
    )


def empty_blob(folder: Path) -> Blob:
    """The blob that artifacts have for a configuration."""
    # docker's registry looks for each blob that a manifest names, also for this one of two bytes that its descriptor
    # holds (distribution, registry/storage/ocimanifesthandler.go, verifyManifest).
    return _blob(folder, EMPTY)


def report_artifacts(image: PlacedImage) -> Iterator[Artifact]:
    """The SBOMs and the provenance, as they are in the layout."""
    layout = FolderFiles(image.path / OCI_DIR)
    for report in image.record.reports:
        yield Artifact(
            artifact_type=report.artifact_type,
            manifest=layout.read(blob_path(report.manifest_digest)),
            blob=Blob(digest=report.digest, size_bytes=report.size_bytes, file=layout.file(blob_path(report.digest))),
        )


def bundle_of(admitted: Admitted) -> Bundle:
    """The certificate as a bundle."""
    return make_bundle(decode(admitted.content), admitted.certificate.predicate_type)


def certificate_artifacts(
    manifest: bytes, admitted: Admitted, signer: Signer | None, folder: Path
) -> Iterator[Artifact]:
    """The certificate as a bundle, and as a test result where there is a key to sign that with.

    Args:
        manifest: of the image.
        folder: where their files are written.
    """
    bundles = [bundle_of(admitted)]
    if signer is not None:
        bundles.append(result_bundle(admitted.certificate, signer))
    for bundle in bundles:
        # The moment of issue and not that of publishing: published again, the artifact is the same and is not sent.
        yield _bundle_artifact(manifest, bundle, admitted.certificate.predicate.issued_at, folder)


def _bundle_artifact(manifest: bytes, bundle: Bundle, created: str, folder: Path) -> Artifact:
    # `oras pull` takes the title for a file's name, and a predicate's type is an address.
    name = f"{bundle.predicate_type.rstrip('/').replace('/', '-').replace(':', '-')}.sigstore.json"
    return _artifact(BUNDLE_TYPE, _blob(folder, bundle.content), name, manifest, bundle.annotations(created))


def sqsh_artifact(image: PlacedImage, manifest: bytes, sqsh: PublishedSqsh) -> Artifact:
    """The .sqsh of an image."""
    name = f"{image.name}.sqsh"
    blob = Blob(digest=sqsh.digest, size_bytes=sqsh.size_bytes, file=image.sqsh())
    # The image's moment and not that of publishing: the artifact stays the same.
    annotations = {CREATED: timestamp(image.record.source_date_epoch), TITLE: name}
    return _artifact(SQSH_TYPE, blob, name, manifest, annotations)


def base_artifact(manifest: bytes, record: BaseRecord, folder: Path) -> Artifact:
    """The record of a base, without the day on which it was made: published twice it is the same."""
    blob = _blob(folder, dump(record.model_copy(update={"made_at": ""})))
    return _artifact(BASE_TYPE, blob, RECORD_FILE, manifest, {TITLE: RECORD_FILE})


def _artifact(kind: str, blob: Blob, name: str, image_manifest: bytes, annotations: dict[str, str]) -> Artifact:
    described = file_descriptor(kind, blob.digest, blob.size_bytes, name)
    subject: dict[str, Json] = {
        # Always the OCI manifest: referrers are looked for by its digest, and docker's has another one.
        "mediaType": MANIFEST_TYPE,
        "digest": sha256_bytes(image_manifest),
        "size": len(image_manifest),
    }
    content = artifact_manifest(kind, described, subject, annotations)
    return Artifact(artifact_type=kind, manifest=content, blob=blob)


def _blob(folder: Path, content: bytes) -> Blob:
    digest = sha256_bytes(content)
    file = folder / digest.removeprefix("sha256:")
    write_atomic(file, content)
    return Blob(digest=digest, size_bytes=len(content), file=file)
