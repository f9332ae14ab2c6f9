"""The build key: everything that decides what comes out of a compile, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from envbuild.catalog.fields import TomlModel
from envbuild.core.digests import Json, digest_of, sha256_file
from envbuild.wheels.build import nvcc_wrapper

# Raised when a wheel made from the same parts would come out differently.
FORMAT = 4
# What a machine brings; a wheel that differs in nothing else from what is wanted fits the lock and the target.
OF_THE_MACHINE = frozenset({"toolkit", "toolkit_packages", "cuda_toolkit", "host_compiler", "nvcc_front"})


class TorchPart(TomlModel):
    """The torch that a wheel is compiled against."""

    version: str
    build: str = Field(description="as the lock has it: 'cu130', ..., 'index'")
    files: str = Field(description="digest over the hashes of its locked files")


class KeyParts(TomlModel):
    """The parts of a build key. Targets and stacks with equal parts share a wheel."""

    package: str
    version: str
    sdist: str = Field(default="", description="sha256 of the sdist")
    commit: str = Field(default="", description="the commit, of a package that comes from git")
    subdirectory: str = Field(default="", description="the folder of the commit that is built; empty for its top")
    platform: str = Field(description="'linux/amd64', ...")
    python: str = Field(description="the ABI: 'cp310', ...")
    torch: TorchPart
    toolkit: Literal["system", "index"] = Field(default="system", description="whose CUDA toolkit it is")
    toolkit_packages: dict[str, str] = Field(
        default_factory=dict, description="the index's packages that the toolkit is made of, and their versions"
    )
    cuda_toolkit: str = Field(description="version of nvcc, '13.0.88'")
    host_compiler: str = Field(description="'g++ 12.2.0'")
    header_packages: dict[str, str] = Field(description="packages whose headers are included, and their versions")
    headers: tuple[str, ...] = Field(description="folders of site-packages that the compilers search")
    sm: tuple[str, ...]
    ptx: tuple[str, ...]
    # A wheel that was checked for a newer base may need symbols that an older base lacks.
    glibc: str = Field(description="the newest glibc that the wheel may ask for: the base's")
    build_requirements: dict[str, str] = Field(description="what the build uses, and the locked versions")
    variables: dict[str, str] = Field(description="the declared variables of the build")
    gpu_code: bool = Field(default=True, description="whether it has CUDA sources, whose code its wheel must show")
    # It decides the architectures and the names of intermediate files, which come back in object files.
    # Every change of its text, of a comment too, changes all keys.
    nvcc_front: str = Field(description="digest of the script that stands before nvcc")
    patches: tuple[str, ...] = Field(default=(), description="digests of patches, in order")

    @property
    def key(self) -> str:
        """``sha256:<hex>`` over all parts; those at their defaults do not count, so that a new one changes no key."""
        return digest_of({"format": FORMAT, "parts": self.model_dump(mode="json", exclude_defaults=True)})

    def flat(self) -> dict[str, str]:
        """The parts as lines for people: ``torch.version`` -> ``2.11.0``."""
        return dict(sorted(_flat("", self.model_dump(mode="json"))))

    def without_machine(self) -> dict[str, Json]:
        """All parts but those that a machine brings: one without compilers can compute this much of a key."""
        # The type that pydantic states for exclude (IncEx) is a set.
        return self.model_dump(mode="json", exclude=set(OF_THE_MACHINE))

    def fits(self, wanted: KeyParts) -> bool:
        """Whether a wheel with these parts may stand in for the one wanted: only compilers' versions differ."""
        return self.without_machine() == wanted.without_machine()


def _flat(prefix: str, value: Json) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for name, inner in value.items() for pair in _flat(f"{prefix}.{name}" if prefix else name, inner)]
    if isinstance(value, list | tuple):
        return [(prefix, " ".join(str(part) for part in value))]
    return [(prefix, str(value))]


def difference(one: KeyParts, other: KeyParts) -> dict[str, tuple[str, str]]:
    """The parts in which two keys differ: ``name -> (in one, in other)``; empty text where one lacks it."""
    left, right = one.flat(), other.flat()
    names = sorted({*left, *right})
    return {name: (left.get(name, ""), right.get(name, "")) for name in names if left.get(name) != right.get(name)}


def front_digest() -> str:
    """The version of the nvcc front: the digest of its source."""
    return sha256_file(Path(nvcc_wrapper.__file__))
