"""Package indexes that components name, each for certain packages: by name in a lock, by address at a site."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from envbuild.core.errors import EnvbuildError

# The range of a constraint that limits nothing.
ANY_RELEASE = ">=0"


@dataclass(frozen=True, order=True)
class NamedIndex:
    """An index, and where the site has it."""

    name: str
    url: str

    @property
    def argument(self) -> str:
        """The index as uv's --index takes it: with its name, by which credentials are found."""
        return f"{self.name}={self.url}"


def named_indexes(indexes: Mapping[str, str]) -> tuple[NamedIndex, ...]:
    """The indexes of a site, of which it has the addresses by name."""
    return tuple(NamedIndex(name, url) for name, url in indexes.items())


@dataclass(frozen=True)
class OwnIndexes:
    """The packages that are taken from an index of their own: no other index is asked about them.

    Attributes:
        places: the index, by package.
        refused: why nothing may be asked about a package (the site does not name its index), by package.
    """

    places: Mapping[str, NamedIndex] = field(default_factory=dict)
    refused: Mapping[str, EnvbuildError] = field(default_factory=dict)

    def agrees_with(self, other: OwnIndexes, packages: Collection[str]) -> bool:
        """Whether both say the same of these packages."""
        return all(
            self.places.get(name) == other.places.get(name) and (name in self.refused) == (name in other.refused)
            for name in packages
        )

    def settings(self, packages: Collection[str]) -> dict[str, object]:
        """The keys of ``[tool.uv]`` for a question about packages, which may need others that have an index.

        Raises:
            EnvbuildError: nothing may be asked about one of them.
        """
        for name in packages:
            if name in self.refused:
                raise self.refused[name]
        if not self.places and not self.refused:
            return {}
        indexes = [
            {"name": index.name, "url": index.url, "explicit": True} for index in sorted({*self.places.values()})
        ]
        return {
            **({"index": indexes} if indexes else {}),
            "sources": {name: {"index": index.name} for name, index in sorted(self.places.items())},
            # uv takes the source of what is required or limited by the project, and drops a constraint without a range.
            "constraint-dependencies": [f"{name}{ANY_RELEASE}" for name in sorted(self.places)],
            "exclude-dependencies": sorted(self.refused),
        }
