"""An image that a command line names."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.image.record import ImageRecord
from envbuild.oci.image import Image


@dataclass(frozen=True, kw_only=True)
class OpenedImage(Image):
    """An image, and what is known about it besides its own documents.

    Attributes:
        source: as it was named.
        kind: folder, layout, archive or sqsh.
        record: envbuild's own, where it lies next to the image and is about it.
        components: the stack's components, as far as the record or an attached SBOM states them.
    """

    source: str
    kind: str
    record: ImageRecord | None = None
    components: tuple[str, ...] = ()
