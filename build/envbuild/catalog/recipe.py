"""A recipe: how a package of the compile phase is built."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from envbuild.catalog.fields import PackageName, Specifier, TomlModel, VariableName

# What every build gets from envbuild itself.
RESERVED = frozenset(("PATH", "HOME", "TMPDIR", "CC", "CXX", "CUDA_HOME", "CUDA_PATH", "PYTORCH_NVCC", "NVCC_CCBIN"))
RESERVED |= {"CUDAHOSTCXX", "CPATH", "MAX_JOBS", "TORCH_CUDA_ARCH_LIST", "SOURCE_DATE_EPOCH", "UV_CACHE_DIR"}
_PLACEHOLDER = re.compile(r"\{(\w*)\}?")
PLACEHOLDERS = ("sm", "sm_dotted", "cuda_major")


def _value(text: str) -> str:
    # execve(2) takes no NUL, and a line end would end the variable in logs and scripts.
    if not text.isprintable():
        raise ValueError("it holds control characters, which no variable can have")
    # The pattern also finds a brace that is never closed.
    for name in _PLACEHOLDER.findall(text):
        if f"{{{name}}}" not in text or name not in PLACEHOLDERS:
            known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            raise ValueError(f"{{{name}}} is not a placeholder; there are {known}")
    return text


def _reserved(variables: dict[str, BuildVariable]) -> dict[str, BuildVariable]:
    if taken := sorted(RESERVED & variables.keys()):
        raise ValueError(f"{', '.join(taken)} is set by envbuild for every build, and no recipe's to set")
    return variables


class BuildVariable(TomlModel):
    """A variable that is set while a wheel is built."""

    value: Annotated[str, AfterValidator(_value)] = Field(
        min_length=1,
        description="{sm} becomes the target's SM list as '90;100a', {sm_dotted} the same as '9.0;10.0a'",
    )
    reason: str = Field(min_length=1, description="why the build needs it, with the evidence")


class Patch(TomlModel):
    """A change to a package's sources before they are built, in the form of ``git diff``."""

    file: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*\.patch$")] = Field(
        description="its name in envs/wheels/patches/"
    )
    versions: Specifier = Field(description="the versions of the package that it is for")
    reason: str = Field(min_length=1, description="why the build needs it, with the evidence")


class WheelRecipe(TomlModel):
    """How a package of the compile phase is built (``envs/wheels/*.toml``); the file's name is the package's."""

    summary: str
    gpu_code: bool = Field(default=True, description="whether it has CUDA sources: then its wheel must show them")
    variables: Annotated[dict[VariableName, BuildVariable], AfterValidator(_reserved)] = Field(default_factory=dict)
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
    extension_module: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$")] | None = Field(
        default=None,
        description="its one compiled module; `lock` verifies with a stub of it while the wheel is not built",
    )
    python_folders: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w/]*$")], ...] = Field(
        default=(),
        description="folders of the sources with the Python code around `extension_module`, where there is any: the "
        "stub's verification takes them as they are",
    )
    # An nvcc process of flash-attn or causal-conv1d takes 2 to 4 GB.
    job_memory_gib: Annotated[float, Field(gt=0, le=64)] = Field(
        default=4, description="memory of one compiler process at its peak, in GiB"
    )
    # flash-attn 2.8.3 takes 3 hours of processor time for one SM (72 files of 155 s).
    time_limit_minutes: Annotated[int, Field(gt=0, le=10_080)] = Field(
        default=360, description="after which the build is ended"
    )
    check_limit_seconds: Annotated[int, Field(gt=0, le=86_400)] = Field(
        default=180,
        description="for loading what was built, and its modules; the import of torch counts",
    )
