"""A base: the userland that a stack is put on, and how it is obtained."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from envbuild.catalog.fields import Device, Name, PackageName, TomlModel
from envbuild.core.errors import CheckRefusedError, InternalError
from envbuild.core.text import quoted_command
from envbuild.core.validation import Digest

NOT_RESOLVED = "digest not resolved"


class PythonSource(str, Enum):
    """Where an environment's Python comes from.

    ``base``: the distribution's own. ``standalone``: a build that uv installs. ``prefix``: one that lies in a folder of
    the base already (conda's, or a site's own).
    """

    BASE = "base"
    STANDALONE = "standalone"
    PREFIX = "prefix"


class BasePython(TomlModel):
    """The Python of a base."""

    version: Annotated[str, StringConstraints(pattern=r"^3\.\d+$")] = Field(description="major.minor")
    source: PythonSource
    executable: Annotated[str, StringConstraints(pattern=r"^/")]


class BaseTorch(TomlModel):
    """Which build of torch a base takes."""

    # The local version label of PEP 440, as PyTorch's own indexes use it: 2.13.0+cpu.
    build: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+$")] = Field(
        description="the part after the plus sign of torch's version ('cpu', 'cu130', ...); 'index': the build that "
        "the package index has"
    )


class Mmdebstrap(TomlModel):
    """A root file system made by mmdebstrap from the machine's own apt sources."""

    method: Literal["mmdebstrap"]
    # mmdebstrap of one suite gives other packages each day: bases that it makes have no digest to pin.
    suite: Name
    components: tuple[Name, ...] = Field(min_length=1)
    packages: tuple[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9+.-]+$")], ...]

    @property
    def source(self) -> str:
        return f"mmdebstrap {self.suite}"


class RegistryImage(TomlModel):
    """A root file system that is an image on a registry."""

    method: Literal["oci"]
    # A tag is required: without one, registries mean "latest", which names nothing.
    image: Annotated[str, StringConstraints(pattern=r"^[^\s@/]+(/[^\s@/]+)+:[A-Za-z0-9_][A-Za-z0-9_.-]*$")] = Field(
        description="registry/repository:tag"
    )
    digest: Digest | None = Field(
        default=None, description="the image's digest; until it was resolved, nothing can be built on it"
    )

    @property
    def source(self) -> str:
        return self.image


class OciLayout(TomlModel):
    """A root file system that is an image in an OCI layout: a directory with oci-layout and index.json."""

    method: Literal["layout"]
    path: str = Field(min_length=1, description="the directory; relative to the folder that holds envs/")
    tag: str | None = Field(default=None, description="the image's tag in it; needed where there are several")
    digest: Digest | None = Field(
        default=None, description="the image's digest; until it was resolved, nothing can be built on it"
    )

    @property
    def source(self) -> str:
        return f"the OCI layout {self.path}" + (f", tag {self.tag}" if self.tag else "")


class Tar(TomlModel):
    """A root file system that is in a tar."""

    method: Literal["tar"]
    path: str = Field(min_length=1, description="the file; relative to the folder that holds envs/")
    format: Literal["rootfs", "docker-archive", "oci-archive"] = Field(
        description="'rootfs': the root file system itself, plain or gzip; 'docker-archive': what docker save writes; "
        "'oci-archive': an OCI layout"
    )
    tag: str | None = Field(default=None, description="the image's tag in an archive; needed where there are several")
    digest: Digest | None = Field(
        default=None, description="the digest of the file; until it was resolved, nothing can be built on it"
    )

    @property
    def source(self) -> str:
        return f"the {self.format} {self.path}" + (f", tag {self.tag}" if self.tag else "")


class Base(TomlModel):
    """The userland a stack is put on (``envs/bases/*.toml``)."""

    summary: str
    # Not in dumps, and so in no digest: the first image that is built on a base makes no lock of it old.
    never_built: bool = Field(
        default=False, exclude=True, description="it was locked on, and no image on it was built and certified yet"
    )
    distribution: Literal["debian", "ubuntu"]
    release: str = Field(description="VERSION_ID of /etc/os-release")
    platform: Literal["linux/amd64", "linux/arm64"]
    # Wheels for a newer glibc resolve and do not install (manylinux_2_39 on Debian 12, which has 2.36).
    glibc: Annotated[str, StringConstraints(pattern=r"^2\.\d+$")]
    python: BasePython
    torch: BaseTorch
    cuda: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$")] | None = Field(
        default=None, description="the CUDA that the environment's packages are for, major.minor; none: no CUDA"
    )
    # An NGC image has a torch of NVIDIA's own: 2.9.0a0+50eac811a6.nv25.9 in pytorch:25.09-py3.
    provides: dict[PackageName, str] = Field(
        default_factory=dict, description="packages that the base brings and no lock may replace, with their versions"
    )
    # With a discriminator pydantic reports the errors of the method that is named, and not of all four.
    obtain: Annotated[Mmdebstrap | RegistryImage | OciLayout | Tar, Field(discriminator="method")]

    @property
    def cuda_major(self) -> str | None:
        """``13`` of CUDA 13.0; None without CUDA."""
        return self.cuda.split(".")[0] if self.cuda else None

    @property
    def device(self) -> Device:
        return Device.CPU if self.cuda is None else Device.CUDA

    @property
    def archive(self) -> Mmdebstrap:
        """How mmdebstrap makes it; for bases that it makes."""
        if isinstance(self.obtain, Mmdebstrap):
            return self.obtain
        raise InternalError(f"the base is {self.obtain.source}, and not made by mmdebstrap")

    @property
    def pinned(self) -> Digest | None:
        """The digest that it must have; None for one that is made from a distribution's packages, or not resolved."""
        return None if isinstance(self.obtain, Mmdebstrap) else self.obtain.digest

    @property
    def is_resolved(self) -> bool:
        """Whether it can be built on: what is not made here is known by its digest."""
        return isinstance(self.obtain, Mmdebstrap) or self.obtain.digest is not None

    def refuse_unresolved(self, name: str) -> None:
        """Refuse to build on a base whose digest was not asked for.

        Raises:
            CheckRefusedError: it has none; names the command that finds it.
        """
        if not self.is_resolved:
            resolve = quoted_command("envbuild", "image", "resolve", "--base", name)
            raise CheckRefusedError(
                f"the digest of base {name} was not resolved",
                why=f"It is {self.obtain.source}; what has that name may be something else tomorrow, so nothing is "
                "built on it.",
                fix=f"Ask for it: {resolve}\nIt prints what to write under [obtain]; with "
                "--write it does so, in your own envs/.",
            )
