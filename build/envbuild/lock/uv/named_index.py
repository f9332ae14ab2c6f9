"""Package indexes that components name, each for certain packages: by name in a lock, by address at a site."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.core.errors import ConfigurationError, EnvbuildError
from envbuild.core.tomlread import Toml

# The range of a constraint that limits nothing.
ANY_RELEASE = ">=0"
# And of one that no release is in: uv 0.13.8 then does not ask an index at all.
NO_RELEASE = "<0"


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


def never_in_builds(packages: Collection[str]) -> list[str]:
    """What keeps isolated builds from packages with an index of their own, as PEP 508 lines.

    For what a build takes, uv looks on the site's own index alone (uv 0.13.8): there it may be another package.
    """
    return [f"{name}{NO_RELEASE}" for name in sorted(packages)]


def builds_without(packages: Collection[str]) -> dict[str, Toml]:
    """The same as a key of ``[tool.uv]``, where there are any."""
    return {"build-constraint-dependencies": never_in_builds(packages)} if packages else {}


def isolated_build_error(
    built: str, component: str, package: str, *, why: str = "", log: Path | None = None
) -> ConfigurationError:
    """The error for an isolated build that needs a package of an index of its own.

    Args:
        built: what is built, for people.
        component: its name.
        package: what it needs, with the index, for people.
        why: what uv says.
    """
    reason = "An isolated build takes what it needs from the site's own index, where it may be another package."
    return ConfigurationError(
        f"{built} is built with {package}",
        why="\n".join(filter(None, [reason, why])),
        fix=f"Let it be built in the environment, which takes it from that index: [components.{component}] "
        'of the stack with phase = "compile".',
        log=log,
    )


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

    def settings(self, packages: Collection[str]) -> dict[str, Toml]:
        """The keys of ``[tool.uv]`` for a question about packages, which may need others that have an index.

        Raises:
            EnvbuildError: nothing may be asked about one of them.
        """
        for name in packages:
            if name in self.refused:
                raise self.refused[name]
        if not self.places and not self.refused:
            return {}
        indexes: list[Toml] = [
            {"name": index.name, "url": index.url, "explicit": True} for index in sorted({*self.places.values()})
        ]
        return {
            **({"index": indexes} if indexes else {}),
            "sources": {name: {"index": index.name} for name, index in sorted(self.places.items())},
            # uv takes the source of what is required or limited by the project, and drops a constraint without a range.
            "constraint-dependencies": [f"{name}{ANY_RELEASE}" for name in sorted(self.places)],
            "exclude-dependencies": sorted(self.refused),
            **builds_without({*self.places, *self.refused}),
        }
