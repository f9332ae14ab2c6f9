"""What the checks of a finished image read, and what they find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from envbuild.image.scan.models import LayerScan
from envbuild.image.scan.scan import CachedScan
from envbuild.wheels.architectures import Architectures


@dataclass(frozen=True, kw_only=True)
class ImageContents:
    """What the checks of an image read.

    Attributes:
        layers: the image's, lowest first; ``of_base``: digests of those of a base that is an image.
        sm: the target's SMs; empty for a target without GPUs.
        compiled: what each package of the compile phase must contain, by canonical name.
        loaded: the shared libraries of a process that imported torch; None where there is no torch.
        environment: the folder of the environment; ``provided``: packages that the base brings.
    """

    layers: tuple[CachedScan, ...]
    variables: Mapping[str, str]
    labels: Mapping[str, str]
    of_base: frozenset[str] = frozenset()
    sm: tuple[str, ...] = ()
    compiled: Mapping[str, Architectures] = field(default_factory=dict)
    loaded: tuple[str, ...] | None = None
    environment: str = ""
    provided: frozenset[str] = frozenset()

    def scans(self) -> Iterator[tuple[LayerScan, bool]]:
        """Each layer's scan, and whether the layer is of a base that is an image."""
        for layer in self.layers:
            yield layer.scan, layer.digest in self.of_base


@dataclass(frozen=True, kw_only=True)
class ImageFinding:
    """A fault of an image.

    Attributes:
        of_base: it is in a layer of a base that is an image: reported, and not refused.
    """

    text: str
    of_base: bool = False

    def __str__(self) -> str:
        return f"{self.text} (in the base)" if self.of_base else self.text
