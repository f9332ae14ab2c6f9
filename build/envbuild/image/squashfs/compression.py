"""How a .sqsh is compressed: what users may choose, and the options of mksquashfs for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.core.errors import ConfigurationError, UsageError

# The levels of each; None for a compression without levels. What readers need: gzip is as old as squashfs, lzo came
# with Linux 2.6.36, lz4 with 3.19, zstd with 4.14 (squashfs-tools 4.4; squashfuse knows what it was built with).
LEVELS: dict[str, range | None] = {"zstd": range(1, 23), "lz4": None, "lzo": range(1, 10), "gzip": range(1, 10)}
NAMES = tuple(LEVELS)


@dataclass(frozen=True, kw_only=True)
class Compression:
    """A compression, and its level where one was chosen."""

    name: str
    level: int | None = None

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name}:{self.level}"

    @classmethod
    def parse(cls, text: str) -> Compression:
        """``NAME`` or ``NAME:LEVEL``.

        Raises:
            UsageError: the compression or its level is unknown.
        """
        name, colon, level = text.partition(":")
        if name not in LEVELS:
            raise UsageError(
                f"unknown compression {name!r} for a .sqsh", why=f"Allowed: {', '.join(NAMES)}.", fix=_EXAMPLE
            )
        if not colon:
            return cls(name=name)
        levels = LEVELS[name]
        if levels is None:
            raise UsageError(f"compression {name} has no levels", why=f"The option is {text!r}.", fix=f"Write {name}.")
        if not (level.isascii() and level.isdigit() and int(level) in levels):
            raise UsageError(
                f"compression {name} has no level {level!r}",
                why=f"Its levels are {levels[0]} to {levels[-1]}.",
                fix=_EXAMPLE,
            )
        return cls(name=name, level=int(level))

    def options(self) -> tuple[str, ...]:
        """The options of mksquashfs. Always with a level: its default differs between versions."""
        level = self.level
        if self.name == "lzo" and level is None:
            return "-comp", "lzo", "-Xalgorithm", "lzo1x_1_15"  # the fast one, which has no levels
        if self.name == "lz4":
            return "-comp", "lz4"
        default = {"zstd": 1, "gzip": 6, "lzo": 8}[self.name]
        return "-comp", self.name, "-Xcompression-level", str(level or default)


_EXAMPLE = "For example: --sqsh-compression zstd, or gzip:6."
# Half the size of what enroot writes, at the speed of copying; every reader since squashfs-tools 4.4 knows it.
DEFAULT = Compression(name="zstd")


def check_readable(compression: Compression, readable: Sequence[str], cluster: str) -> None:
    """Refuse what the nodes of a cluster cannot read.

    Args:
        readable: the cluster's ``sqsh_compression``; empty when its file has none.

    Raises:
        ConfigurationError: their tools do not know the compression.
    """
    if readable and compression.name not in readable:
        raise ConfigurationError(
            f"the nodes of cluster {cluster} cannot read a .sqsh compressed with {compression.name}",
            why=f"envs/clusters/{cluster}.toml: sqsh_compression = [{', '.join(map(repr, readable))}]".replace("'", '"')
            + "; a container would not start there.",
            fix=f"Add --sqsh-compression {readable[0]}. If the nodes' squashfs-tools, squashfuse and kernel do know "
            f"{compression.name}, add it to that list.",
        )
