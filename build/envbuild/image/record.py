"""What is known about an image, its layers and its base: the records that lie next to them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from envbuild.catalog.fields import Name, TomlModel
from envbuild.catalog.stack import Driver
from envbuild.oci.models import BaseConfig
from envbuild.rootfs.layer import LayerRecord

# Its reports.
CYCLONEDX_FILE = "sbom.cdx.json"
SPDX_FILE = "sbom.spdx.json"
PROVENANCE_FILE = "provenance.json"
SCHEMA: Literal["envbuild.image/1"] = "envbuild.image/1"


class BaseRecord(TomlModel):
    """A base as it was made: its layers and every Debian package in it."""

    schema_: Literal["envbuild.base/2"] = Field(alias="schema", default="envbuild.base/2")
    layers: tuple[LayerRecord, ...] = Field(min_length=1)
    made_by: str = Field(description="the program and its version; or the image, with its digest")
    name: str = Field(default="", description="of the image that it is, on its registry")
    digest: str = Field(default="", description="of the image that it is: of its manifest, or of its configuration")
    config: BaseConfig = BaseConfig()
    packages: dict[str, str] = Field(description="version of each Debian package by its name")
    made_at: str = Field(default="", description="when it was made here; empty for one that was taken from elsewhere")


class EnvironmentLayerRecord(TomlModel):
    """A layer of an environment: its packages, and what its file is."""

    schema_: Literal["envbuild.environment-layer/1"] = Field(alias="schema", default="envbuild.environment-layer/1")
    key: str = Field(description="the digest of everything that decides its bytes")
    layer: LayerRecord
    packages: dict[str, str]


class EnvironmentRecord(TomlModel):
    """An environment that was put together and tried: its layers and every Python distribution in it."""

    schema_: Literal["envbuild.environment/2"] = Field(alias="schema", default="envbuild.environment/2")
    layers: tuple[str, ...] = Field(description="their keys, lowest first")
    packages: dict[str, str]
    driver: Driver | None = Field(
        default=None, description="what starts there, as the certification's driver; none without torch"
    )
    not_checked: dict[str, str] = Field(
        default_factory=dict, description="modules that the import check did not cover, or the driver, and why"
    )
    loaded: tuple[str, ...] | None = Field(
        default=None, description="shared libraries of a process that imported torch; none without torch"
    )


class SqshRecord(TomlModel):
    """A .sqsh file, and what packed it."""

    digest: str
    size_bytes: int
    packed_by: str
    compression: str


class CheckRecord(TomlModel):
    """A check of the finished image, and what it found."""

    findings: tuple[str, ...] = ()
    allowed: bool = Field(default=False, description="its findings were let pass with --allow")


class ReferrerRecord(TomlModel):
    """A report about the image: its file next to it, and the OCI artifact that refers to its manifest."""

    file: str
    artifact_type: str
    manifest_digest: str
    digest: str = Field(description="of the file")
    size_bytes: int


class ImageRecord(TomlModel):
    """An image: what it was made from, and the digests under which it is known."""

    schema_: Literal["envbuild.image/1"] = Field(alias="schema", default=SCHEMA)
    key: str = Field(description="the digest of everything that decides the image")
    stack: Name
    base: Name
    target: Name = Field(description="the target that it lies here for; others of its hardware have the same image")
    hardware: str = Field(default="", description="what it was built for, as text")
    lock_digest: str
    source_date_epoch: int
    oci_digest: str = Field(description="of the OCI manifest")
    config_digest: str
    layers: tuple[LayerRecord, ...]
    sqsh: SqshRecord | None
    python: str = Field(description="the environment's interpreter, as seen in the image")
    environment: tuple[str, ...] = Field(description="the image's variables, NAME=VALUE")
    base_digest: str = Field(description="of the base: its layers, and its configuration if it has one")
    base_made_by: str
    base_rebuilt: bool = Field(default=True, description="the base is not the one that the lock was verified on")
    base_packages: dict[str, str]
    packages: dict[str, str]
    components: tuple[str, ...] = Field(default=(), description="the packages that the stack names")
    not_checked: dict[str, str] = Field(
        default_factory=dict, description="modules that the import check did not cover, or the driver, and why"
    )
    wheels: dict[str, str] = Field(
        default_factory=dict, description="packages installed from the wheelhouse, and the digests of their wheels"
    )
    reports: tuple[ReferrerRecord, ...] = Field(default=(), description="SBOMs and provenance, attached to the image")
    checks: dict[str, CheckRecord] = Field(default_factory=dict, description="the checks that ran, by their code")
    uv: str
    gzip: str

    @property
    def report_name(self) -> str:
        """``mcore-debian12``: the image in its reports, which name no target since several may have the image."""
        return f"{self.stack}-{self.base}"

    @property
    def sqsh_digest(self) -> str | None:
        """The digest of the .sqsh; None when the image was built without one."""
        return self.sqsh.digest if self.sqsh else None
