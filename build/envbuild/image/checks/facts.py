"""What the checks of a finished image look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from envbuild.image.scan.cache import CachedScan
from envbuild.image.scan.scan import LayerScan
from envbuild.wheels.architectures import Architectures


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What checks look at.

    Attributes:
        layers: the image's, lowest first; ``of_base``: which of them somebody else made.
        sm: the target's SMs; none for a target without GPUs.
        compiled: what each package of the compile phase must contain, by canonical name.
        loaded: the shared libraries that a process has which imported torch; None where there is no torch.
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
        """Each layer's scan, and whether somebody else made the layer."""
        for item in self.layers:
            yield item.scan, item.digest in self.of_base
