"""An image and its layers, opened for reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
