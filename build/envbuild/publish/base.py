"""Publishes a base as an image of its own: a lock names the base it was verified on, and others take it from there."""

from __future__ import annotations

from dataclasses import dataclass, field

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.core.digests import sha256_bytes
from envbuild.image.base import make_base
from envbuild.image.base.base import base_image, base_tag
from envbuild.oci.files import FolderFiles, blob_path
from envbuild.oci.models import MANIFEST_TYPE
from envbuild.oci.push import Blob, RegistryManifest, Sent, digest_of_tag, push_blobs, put_manifest
from envbuild.oci.referrers import attach
from envbuild.oci.write import write_layout
from envbuild.publish.artifacts import base_artifact, empty_blob
from envbuild.publish.repository import open_repository

OCI = "oci"


@dataclass(frozen=True, kw_only=True)
class PublishedBase:
    """A base on a registry.

    Attributes:
        digest: of its image; locks name it.
        nothing_to_do: it was there already.
    """

    digest: str
    tag: str
    sent: Sent = field(default_factory=Sent)
    nothing_to_do: bool = False


def publish_base(selection: Selection, to: str, context: Context) -> PublishedBase:
    """Publish the base of a selection as it is in the store, with its list of packages; made where it is not there.

    Args:
        to: the repository, ``HOST/REPOSITORY``.

    Raises:
        NetworkError: the registry cannot be reached, or refuses.
        EnvbuildError: the base cannot be made.
    """
    registry = open_repository(to, context.site)
    base = make_base(selection, context)
    with context.store.staging("publish-base") as folder:
        image = base_image(base.record, selection.base.platform)
        write_layout(folder / OCI, image, base.layers, selection.base_name)
        tag = base_tag(selection.base_name, image.digest)
        # The tag is written last: where it names the image, its record and its blobs are there, too.
        if digest_of_tag(registry, tag) == image.digest:
            return PublishedBase(digest=image.digest, tag=tag, nothing_to_do=True)
        layout = FolderFiles(folder / OCI)
        sizes = {image.config_digest: len(image.config)}
        sizes |= {layer.record.digest: layer.record.size_bytes for layer in base.layers}
        blobs = [Blob(digest=name, size_bytes=size, file=layout.file(blob_path(name))) for name, size in sizes.items()]
        record = base_artifact(image.manifest, base.record, folder)
        with context.reporter.step(f"push base {selection.base_name} to {registry.address}"):
            sent = push_blobs(registry, [*blobs, empty_blob(folder), record.blob])
            manifest = RegistryManifest(content=image.manifest, media_type=MANIFEST_TYPE)
            put_manifest(registry, image.digest, manifest)
            attached = attach(registry, {record.artifact_type: [record.manifest]}, sha256_bytes(image.manifest))
            put_manifest(registry, tag, manifest)
    return PublishedBase(digest=image.digest, tag=tag, sent=sent + Sent(bytes_sent=attached + len(image.manifest)))
