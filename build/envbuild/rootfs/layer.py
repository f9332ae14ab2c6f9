"""A layer: what is known about it, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from envbuild.catalog.fields import Name, TomlModel
from envbuild.rootfs.blobs import LayerBlob

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"


class LayerRecord(TomlModel):
    """A layer: the digest of its file, and of the tar in it."""

    name: Name
    digest: str
    diff_id: str
    size_bytes: int
    unpacked_bytes: int
    entries: int
    media_type: str = LAYER_TYPE


class Layer(NamedTuple):
    """A layer: what is known about it, and its file."""

    record: LayerRecord
    file: Path

    @property
    def blob(self) -> LayerBlob:
        """The layer, to be read with all that is known about it."""
        return LayerBlob(
            file=self.file,
            digest=self.record.digest,
            size_bytes=self.record.size_bytes,
            diff_id=self.record.diff_id,
            media_type=self.record.media_type,
            unpacked_bytes=self.record.unpacked_bytes,
        )
