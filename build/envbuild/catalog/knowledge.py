"""What is known of CUDA, of packages and of upstream's scripts, with its evidence (``envs/knowledge/*.toml``).

The files come with envbuild: a project's ``envs/`` adds nothing to them and replaces none.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, TypeVar

from pydantic import Field, StringConstraints

from envbuild.catalog import toml
from envbuild.catalog.data import data_root
from envbuild.catalog.fields import PackageName, Specifier, TomlModel

FOLDER = "knowledge"
Sm = Annotated[str, StringConstraints(pattern=r"^[1-9]\d{1,2}$")]
Version = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)*$")]
M = TypeVar("M", bound=TomlModel)


class CudaKnowledge(TomlModel):
    """SMs, by their digits (``90``), and drivers, by the major version of a CUDA."""

    summary: str
    evidence: str = Field(min_length=1)
    jetson: frozenset[Sm]
    first_cuda: dict[Sm, Version]
    dropped_by: dict[Sm, Version]
    oldest_driver: dict[str, Version]


class Family(TomlModel):
    """Packages that work in one version only."""

    packages: frozenset[PackageName] = Field(min_length=2)
    evidence: str = Field(min_length=1)


class OverOthers(TomlModel):
    """A package that is installed again, since its files lie over another's."""

    package: PackageName
    versions: Specifier
    evidence: str = Field(min_length=1)


class PackageKnowledge(TomlModel):
    """Families, packages that lie over others, and by a module's name the package that brings it."""

    summary: str
    families: tuple[Family, ...]
    over_others: tuple[OverOthers, ...]
    distributions: dict[str, PackageName]


class ScriptKnowledge(TomlModel):
    """Upstream's scripts, and by the names in them (variables, ends of addresses) the packages that are built."""

    summary: str
    evidence: str = Field(min_length=1)
    files: tuple[str, ...]
    variables: dict[str, PackageName]
    addresses: dict[str, PackageName]
    repositories: dict[PackageName, str]


@cache
def cuda() -> CudaKnowledge:
    """``cuda.toml``."""
    return load("cuda", CudaKnowledge)


@cache
def packages() -> PackageKnowledge:
    """``packages.toml``."""
    return load("packages", PackageKnowledge)


@cache
def install_scripts() -> ScriptKnowledge:
    """``install-scripts.toml``."""
    return load("install-scripts", ScriptKnowledge)


def load(name: str, model: type[M]) -> M:
    """The file of a name."""
    path = data_root() / "envs" / FOLDER / f"{name}.toml"
    wanted = toml.Wanted("envbuild's own data", why="It comes with envbuild.", fix="Install envbuild again.")
    return toml.load(path, model, wanted)
