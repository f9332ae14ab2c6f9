"""A layer: what is known about it, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from envbuild.catalog.fields import Name, TomlModel

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
