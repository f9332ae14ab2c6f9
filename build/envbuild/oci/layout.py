"""Images in OCI layouts and in archives of ``docker save``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel, Field, RootModel

from envbuild.core.digests import sha256_file
from envbuild.oci.files import ImageFiles, blob_path
from envbuild.oci.index import IndexEntry, find_tagged
from envbuild.oci.models import Configuration
from envbuild.rootfs.blobs import LayerBlob, check_blob
from envbuild.rootfs.members import Member
from envbuild.rootfs.single_layer import members_of
from envbuild.rootfs.stream import Content


@dataclass(frozen=True, kw_only=True)
class ImageLayer:
    """A layer of an image.

    Attributes:
        digest: of the layer as it is shipped.
        name: what the image's history states about it.
        blob: its file; None where it is not a tar.
        members: reads it, and compares it with its digest.
        check: only the latter; None where the digest was found by hashing it.
    """

    digest: str
    size_bytes: int
    name: str
    members: Callable[[], Iterator[tuple[Member, Content | None]]]
    blob: LayerBlob | None = None
    check: Callable[[], None] | None = None

    @classmethod
    def from_blob(cls, blob: LayerBlob, name: str, *, hashed: bool = False) -> ImageLayer:
        """The layer of a blob with a digest.

        Args:
            hashed: the digest is not stated by the image, but was found by hashing the blob.
        """
        return cls(
            digest=blob.digest or "",
            size_bytes=blob.file.stat().st_size,
            name=name,
            members=lambda: members_of(blob),
            blob=blob,
            check=None if hashed else lambda: check_blob(blob),
        )


@dataclass(frozen=True, kw_only=True)
class AttachedReport:
    """A report that is attached to an image: its kind, and the digests of its manifest and of its files."""

    artifact_type: str
    digest: str
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image, whatever it lies in.

    Attributes:
        digest: of its manifest; empty where it has none.
        layers: lowest first.
    """

    digest: str
    config: Configuration
    layers: tuple[ImageLayer, ...]
    reports: tuple[AttachedReport, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """Its environment by name."""
        return self.config.run.variables

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.config.run.labels)

    @property
    def size_bytes(self) -> int:
        """Of all layers as they are shipped."""
        return sum(layer.size_bytes for layer in self.layers)


SAVED_FILE = "manifest.json"


class SavedImage(BaseModel):
    """An image in an archive of ``docker save``."""

    config: str = Field(alias="Config")
    tags: tuple[str, ...] | None = Field(default=None, alias="RepoTags")
    layers: tuple[str, ...] = Field(alias="Layers", min_length=1)


class SavedImages(RootModel[tuple[SavedImage, ...]]):
    """The manifest.json of such an archive."""


def open_layout(files: ImageFiles, tag: str) -> Image:
    """The image of an OCI layout: that with the tag, or the only one. What is listed with it is read whole.

    Raises:
        CheckRefusedError: there is none, there are several, it is damaged, or the index lists something else.
    """
    image = find_tagged(files, tag)
    config = files.blob(image.manifest.config, Configuration)
    layers = []
    for position, descriptor in enumerate(image.manifest.layers):
        layer = LayerBlob(
            file=files.file(blob_path(descriptor.digest)),
            digest=descriptor.digest,
            size_bytes=descriptor.size_bytes,
            # The type of a layer is required (image-spec, descriptor.md). Where it is missing, the first bytes decide.
            media_type=descriptor.media_type or None,
        )
        layers.append(ImageLayer.from_blob(layer, config.layer_name(position)))
    reports = tuple(_read_report(files, report) for report in image.reports)
    return Image(digest=image.digest, config=config, layers=tuple(layers), reports=reports)


def _read_report(files: ImageFiles, entry: IndexEntry) -> AttachedReport:
    """A report, whose every blob has the digest by which it is named, also the empty one that they share."""
    layers = entry.manifest.layers if entry.manifest else ()
    for descriptor in (*([entry.manifest.config] if entry.manifest else []), *layers):
        files.check(descriptor)
    return AttachedReport(
        artifact_type=entry.artifact_type, digest=entry.digest, files=tuple(layer.digest for layer in layers)
    )


def open_docker_archive(files: ImageFiles) -> Image:
    """The image of `docker save`: its layers are plain tars.

    Raises:
        CheckRefusedError: it has several images, or is damaged.
    """
    images = files.parse(SAVED_FILE, SavedImages).root
    if len(images) != 1:
        raise files.refused(f"{SAVED_FILE} lists {len(images)} images; one is read.")
    config = files.parse(images[0].config, Configuration)
    diff_ids = config.rootfs.diff_ids
    layers = []
    for position, path in enumerate(images[0].layers):
        file = files.file(path)
        # The archive has no digests of its files; the configuration has those of the tars in them.
        diff_id = diff_ids[position] if position < len(diff_ids) else None
        blob = LayerBlob(file=file, digest=sha256_file(file), diff_id=diff_id)
        layers.append(ImageLayer.from_blob(blob, config.layer_name(position), hashed=True))
    return Image(digest="", config=config, layers=tuple(layers))
