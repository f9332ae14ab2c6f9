"""How two images differ: packages, layers, bytes to ship, configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envbuild.core.digests import Json
from envbuild.core.text import printable
from envbuild.image.inspect.inspect import Inspected, configuration, megabytes

ONE_OF = {"environment": "variable", "labels": "label"}


@dataclass(frozen=True, kw_only=True)
class ImageChange:
    """Something that is not the same: None where it is not there."""

    name: str
    old: Json
    new: Json

    def as_json(self) -> dict[str, Json]:
        return {"name": self.name, "from": self.old, "to": self.new}

    def line(self) -> str:
        return printable(f"{self.name}: {_shown(self.old)} -> {_shown(self.new)}")


@dataclass(frozen=True, kw_only=True)
class ImageDifference:
    """How two images compare.

    Attributes:
        shared, new: digests of the second image's layers; ``to_ship_bytes``: what who has the first one lacks.
    """

    python: tuple[ImageChange, ...]
    debian: tuple[ImageChange, ...]
    configuration: tuple[ImageChange, ...]
    shared: tuple[str, ...]
    new: tuple[str, ...]
    to_ship_bytes: int
    size_bytes: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs; that layers are packed differently is a difference too."""
        return not (self.python or self.debian or self.configuration or self.new)

    def as_json(self) -> dict[str, Json]:
        """The object that ``--json`` prints."""
        return {
            "packages": {
                "python": [change.as_json() for change in self.python],
                "debian": [change.as_json() for change in self.debian],
            },
            "configuration": [change.as_json() for change in self.configuration],
            "layers": {"shared": list(self.shared), "new": list(self.new)},
            "to_ship_bytes": self.to_ship_bytes,
            "size_bytes": self.size_bytes,
        }

    def lines(self) -> list[str]:
        """The same for people."""
        printed = []
        for title, changes in (
            ("Python packages", self.python),
            ("Debian packages", self.debian),
            ("configuration", self.configuration),
        ):
            if changes:
                printed += [f"{title}:", *[f"  {change.line()}" for change in changes]]
        count = len(self.shared) + len(self.new)
        share = self.to_ship_bytes / self.size_bytes if self.size_bytes else 0
        printed.append(
            f"layers: {len(self.shared)} of {count} are shared; to ship: {megabytes(self.to_ship_bytes)} "
            f"of {megabytes(self.size_bytes)} ({share:.1%})"
        )
        return printed


def compare(old: Inspected, new: Inspected) -> ImageDifference:
    """What is different in ``new``."""
    # Layers of one content that are packed differently have different digests: a registry ships them again.
    known = {layer.digest for layer in old.image.layers}
    sizes = {layer.digest: layer.size_bytes for layer in new.image.layers}
    return ImageDifference(
        python=_changes(old.python, new.python),
        debian=_changes(old.debian, new.debian),
        configuration=_changes(_flat(configuration(old.image)), _flat(configuration(new.image))),
        shared=tuple(digest for digest in sizes if digest in known),
        new=tuple(digest for digest in sizes if digest not in known),
        to_ship_bytes=sum(size for digest, size in sizes.items() if digest not in known),
        size_bytes=sum(sizes.values()),
    )


def _changes(old: Mapping[str, Json], new: Mapping[str, Json]) -> tuple[ImageChange, ...]:
    names = sorted({*old, *new})
    return tuple(
        ImageChange(name=name, old=old.get(name), new=new.get(name)) for name in names if old.get(name) != new.get(name)
    )


def _flat(values: Mapping[str, Json]) -> dict[str, Json]:
    """Each variable and each label by itself; what is empty is as good as not there."""
    flat: dict[str, Json] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{ONE_OF.get(name, name)} {key}": part for key, part in value.items()}
        elif value:
            flat[name] = value
    return flat


def _shown(value: Json) -> str:
    if value is None:
        return "-"
    return " ".join(str(part) for part in value) if isinstance(value, (list, tuple)) else str(value)
