"""A base: the userland that a stack is put on, and how it is obtained."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from envbuild.catalog.fields import Device, Model, Name, PackageName
from envbuild.core.errors import CheckRefusedError


class PythonSource(str, Enum):
    """Where an environment's Python comes from.

    ``base``: the distribution's own. ``standalone``: a build that uv installs. ``prefix``: one that lies in a folder of
    the base already (conda's, or a site's own).
    """

    BASE = "base"
    STANDALONE = "standalone"
    PREFIX = "prefix"


class BasePython(Model):
    """The Python of a base."""

    version: Annotated[str, StringConstraints(pattern=r"^3\.\d+$")] = Field(description="major.minor")
    source: PythonSource
    executable: Annotated[str, StringConstraints(pattern=r"^/")]


class BaseTorch(Model):
    """Which build of torch a base takes."""

    build: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+$")] = Field(
        description="the part after the plus sign of torch's version ('cpu', 'cu130', ...); 'index': the build that "
        "the package index has"
    )


class Mmdebstrap(Model):
    """A root file system made by mmdebstrap from the machine's own apt sources."""

    method: Literal["mmdebstrap"]
    suite: Name
    components: tuple[Name, ...] = Field(min_length=1)
    packages: tuple[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9+.-]+$")], ...]


class OciImage(Model):
    """A root file system that is an image on a registry."""

    method: Literal["oci"]
    image: str = Field(description="registry/repository:tag")
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")] | None = Field(
        default=None, description="the image's digest; until it was resolved, nothing can be built on it"
    )


class Base(Model):
    """The userland a stack is put on (``envs/bases/*.toml``)."""

    summary: str
    distribution: Literal["debian", "ubuntu"]
    release: str = Field(description="VERSION_ID of /etc/os-release")
    platform: Literal["linux/amd64"]
    glibc: Annotated[str, StringConstraints(pattern=r"^2\.\d+$")]
    python: BasePython
    torch: BaseTorch
    cuda: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$")] | None = Field(
        default=None, description="the CUDA that the environment's packages are for, major.minor; none: no CUDA"
    )
    provides: dict[PackageName, str] = Field(
        default_factory=dict, description="packages that the base brings and no lock may replace, with their versions"
    )
    obtain: Annotated[Mmdebstrap | OciImage, Field(discriminator="method")]

    @property
    def device(self) -> Device:
        """Which device the environment's packages are for."""
        return Device.CPU if self.cuda is None else Device.CUDA

    @property
    def archive(self) -> Mmdebstrap:
        """How mmdebstrap makes it.

        Raises:
            CheckRefusedError: it is an image on a registry instead, which no builder starts from yet.
        """
        if isinstance(self.obtain, Mmdebstrap):
            return self.obtain
        image, digest = self.obtain.image, self.obtain.digest
        if digest is None:
            raise CheckRefusedError(
                f"the base {image} is an image on a registry, and its digest was not resolved",
                why="A tag is another image tomorrow; nothing is built on it.",
                fix=f"Ask the registry: skopeo inspect --format '{{{{.Digest}}}}' docker://{image}\n"
                f"(or: docker buildx imagetools inspect --format '{{{{.Manifest.Digest}}}}' {image}), and write what "
                'it says under [obtain] of the base: digest = "sha256:..."',
            )
        raise CheckRefusedError(
            f"the base {image}@{digest} is an image on a registry",
            why="Images are built on bases that mmdebstrap makes; those of registries can be locked, not yet built on.",
            fix='Choose a base with method = "mmdebstrap" (`envbuild list bases`).',
        )
