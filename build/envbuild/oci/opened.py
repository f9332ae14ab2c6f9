"""An image that was opened for reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.core.errors import CheckRefusedError
from envbuild.core.text import printable
from envbuild.image.record import ImageRecord
from envbuild.image.scan.cache import Members
from envbuild.rootfs.blobs import LayerBlob, check_blob
from envbuild.rootfs.single_layer import members_of


@dataclass(frozen=True, kw_only=True)
class OpenedLayer:
    """A layer of an image.

    Attributes:
        digest: of the layer as it is shipped.
        name: what the image's history says of it.
        blob: its file; None for what is no tar.
        members: reads it, and holds it to its digest.
        check: only the latter; None where the digest was found by hashing it.
    """

    digest: str
    size_bytes: int
    name: str
    members: Members
    blob: LayerBlob | None = None
    check: Callable[[], None] | None = None

    @classmethod
    def of(cls, blob: LayerBlob, name: str, *, hashed: bool = False) -> OpenedLayer:
        """The layer of a blob with a digest.

        Args:
            hashed: the digest is not one that somebody states, but was found by hashing the blob.
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
class OpenedImage:
    """An image, whatever it lies in.

    Attributes:
        source: as it was named; ``kind``: folder, layout, archive or sqsh.
        digest: of its manifest; empty where it has none.
        config: the OCI configuration; what a .sqsh has of it.
        record: envbuild's own, where it lies beside it and is about this image.
        components: the stack's components, as far as something beside it says.
    """

    source: str
    kind: str
    digest: str
    config: Mapping[str, Any]
    layers: tuple[OpenedLayer, ...]
    size_bytes: int
    record: ImageRecord | None = None
    components: tuple[str, ...] = ()
    reports: Sequence[Mapping[str, Any]] = field(default=())

    @property
    def run(self) -> Mapping[str, Any]:
        """How it starts: the object ``config`` of its configuration."""
        found = self.config.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def variables(self) -> dict[str, str]:
        """Its environment."""
        pairs = (str(entry).partition("=") for entry in self.run.get("Env") or ())
        return {name: value for name, _, value in pairs}

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return {str(name): str(value) for name, value in (self.run.get("Labels") or {}).items()}


def not_an_image(source: str | Path, why: str) -> CheckRefusedError:
    """The error for what cannot be read as an image."""
    return CheckRefusedError(
        f"{source} is no image that can be read",
        # It may name what the image holds; what a tool said has several lines.
        why="\n".join(map(printable, why.split("\n"))),
        fix="Name a folder of out/images, an OCI layout (FOLDER or FOLDER:TAG), an archive of `docker save` or "
        "`skopeo copy`, or a .sqsh file. If it is one, it is damaged: copy or build it again.",
    )
