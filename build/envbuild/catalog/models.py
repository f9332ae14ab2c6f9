"""The kinds of TOML files under ``envs/``, and those of them that are small: targets, companions.

The name of a file is the name of what it defines. Fields carry their units in their names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from packaging.specifiers import SpecifierSet
from pydantic import Field, StringConstraints, model_validator

from envbuild.catalog.base import Base
from envbuild.catalog.cluster import Cluster
from envbuild.catalog.conflict import Conflict
from envbuild.catalog.fields import Device, PackageName, Specifier, TomlModel
from envbuild.catalog.matrix import Matrix
from envbuild.catalog.policy import Policy
from envbuild.catalog.recipe import WheelRecipe
from envbuild.catalog.stack import Stack


class Target(TomlModel):
    """A hardware generation (``envs/targets/*.toml``)."""

    summary: str
    device: Device
    # The letters are compute capabilities whose code runs on no other GPU (a) or only within its family (f).
    sm: tuple[Annotated[str, StringConstraints(pattern=r"^\d{2,3}[af]?$")], ...] = Field(
        default=(), description="CUDA SM versions, such as '90' or '100a'"
    )
    driver: Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)*$")] | None = Field(
        default=None, description="the oldest NVIDIA driver of the fleet; without it drivers are not checked"
    )
    ptx: bool = Field(
        default=False, description="whether compiled wheels also have PTX for the newest SM, for GPUs yet to come"
    )
    platform: Literal["linux/amd64", "linux/arm64"]

    @model_validator(mode="after")
    def _sm_fits_device(self) -> Target:
        if (self.device is Device.CUDA) != bool(self.sm):
            raise ValueError("a cuda target needs its SM list, a cpu target has none")
        return self


class CompanionRelease(TomlModel):
    """What belongs to some releases of a package."""

    versions: Specifier = Field(min_length=1, description="the releases, as a PEP 440 specifier")
    components: dict[PackageName, Specifier] = Field(min_length=1, description="what belongs to them, as specifiers")
    evidence: str = Field(min_length=1, description="how it is known")


class Companions(TomlModel):
    """What belongs to the releases of a package, where its metadata does not say so (``envs/companions/*.toml``).

    The file's name is the package's.
    """

    summary: str
    releases: tuple[CompanionRelease, ...] = Field(min_length=1, description="the first that has a release counts")

    def for_release(self, version: str) -> CompanionRelease | None:
        """The entry for a release; None when there is none."""
        return next(
            (entry for entry in self.releases if SpecifierSet(entry.versions).contains(version, prereleases=True)), None
        )

    def names(self) -> set[str]:
        """The packages that any entry names."""
        return {name for entry in self.releases for name in entry.components}


KINDS: dict[str, type[TomlModel]] = {
    "stacks": Stack,
    "bases": Base,
    "targets": Target,
    "clusters": Cluster,
    "matrices": Matrix,
    "conflicts": Conflict,
    "companions": Companions,
    "wheels": WheelRecipe,
    "policies": Policy,
}
# Kinds of which a file may name another one that it changes.
EXTENDABLE = frozenset({"stacks", "clusters"})
# What one of each kind is called.
SINGULAR = {
    "stacks": "stack",
    "bases": "base",
    "targets": "target",
    "clusters": "cluster",
    "matrices": "matrix",
    "conflicts": "conflict",
    "companions": "table of companions for",
    "wheels": "recipe for the wheel of",
    "policies": "policy",
}
