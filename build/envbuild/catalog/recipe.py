"""A recipe: how a package of the compile phase is built."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from envbuild.catalog.fields import Model, PackageName, Specifier, VariableName


class BuildVariable(Model):
    """A variable that is set while a wheel is built."""

    value: str = Field(
        min_length=1,
        description="{sm} becomes the target's SM list as '90;100a', {sm_dotted} the same as '9.0;10.0a'",
    )
    reason: str = Field(min_length=1, description="why the build needs it, with the evidence")


class Patch(Model):
    """A change to a package's sources before they are built, in the form of ``git diff``."""

    file: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*\.patch$")] = Field(
        description="its name in envs/wheels/patches/"
    )
    versions: Specifier = Field(description="the versions of the package that it is for")
    reason: str = Field(min_length=1, description="why the build needs it, with the evidence")


class WheelRecipe(Model):
    """How a package of the compile phase is built (``envs/wheels/*.toml``); the file's name is the package's."""

    summary: str
    gpu_code: bool = Field(default=True, description="whether it has CUDA sources: then its wheel must show them")
    variables: dict[VariableName, BuildVariable] = Field(default_factory=dict)
    headers: tuple[
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]|\{cuda_major\})*$")], ...
    ] = Field(
        default=(),
        description="folders of site-packages that the compilers search; {cuda_major} as in a stack's extras",
    )
    build_requirements: tuple[PackageName, ...] = Field(
        default=(), description="what its build uses beyond what its pyproject.toml declares; phase main must have it"
    )
    patches: tuple[Patch, ...] = Field(default=(), description="changes to its sources, in the order of the list")
    foreign_symbols: tuple[Annotated[str, StringConstraints(pattern=r"^\w+$")], ...] = Field(
        default=(),
        description="how names of symbols begin that a library of another package of phase compile brings",
    )
    job_memory_gib: Annotated[float, Field(gt=0, le=64)] = Field(
        default=4, description="memory of one compiler process at its peak, in GiB"
    )
    time_limit_minutes: Annotated[int, Field(gt=0, le=10_080)] = Field(
        default=360, description="after which the build is ended"
    )
