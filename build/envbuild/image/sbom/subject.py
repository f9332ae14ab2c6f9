"""What the reports are about: an image, named by its digests."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.image.sbom.inventory import ListedPackage


@dataclass(frozen=True, kw_only=True)
class ImageSubject:
    """An image and its packages.

    Attributes:
        digest: of the OCI manifest; ``sqsh``: of the .sqsh, empty without one.
        epoch: the source date epoch, which is the time of every report.
    """

    stack: str
    base: str
    hardware: str
    digest: str
    sqsh: str
    lock_digest: str
    base_digest: str
    epoch: int
    packages: tuple[ListedPackage, ...]

    @property
    def name(self) -> str:
        """``mcore-debian12``: several targets may have the image, so its reports name none of them."""
        return f"{self.stack}-{self.base}"
