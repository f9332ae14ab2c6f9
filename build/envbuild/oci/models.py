"""The documents of an image (OCI image-spec 1.1, docker's image manifest 2.2) as types, checked when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from envbuild.catalog.fields import TomlModel
from envbuild.core import jsonread
from envbuild.core.digests import Json
from envbuild.core.errors import CheckRefusedError
from envbuild.core.text import printable
from envbuild.core.validation import Digest

M = TypeVar("M", bound=BaseModel)

_OCI, _DOCKER = "application/vnd.oci.image.", "application/vnd.docker."
# image-spec, media-types.md, "Compatibility Matrix": docker's documents of schema 2 have the same fields.
INDEX_TYPES = (f"{_OCI}index.v1+json", f"{_DOCKER}distribution.manifest.list.v2+json")
MANIFEST_TYPE = f"{_OCI}manifest.v1+json"
DOCKER_MANIFEST_TYPE = f"{_DOCKER}distribution.manifest.v2+json"
MANIFEST_TYPES = (MANIFEST_TYPE, DOCKER_MANIFEST_TYPE)
CONFIG_TYPE = f"{_OCI}config.v1+json"
# Docker's names for layers, and OCI's for the same bytes, which is what an OCI manifest may hold.
LAYER_TYPES = {
    f"{_DOCKER}image.rootfs.diff.tar.gzip": f"{_OCI}layer.v1.tar+gzip",
    f"{_DOCKER}image.rootfs.diff.tar.zstd": f"{_OCI}layer.v1.tar+zstd",
    f"{_DOCKER}image.rootfs.diff.tar": f"{_OCI}layer.v1.tar",
    **{name: name for name in (f"{_OCI}layer.v1.tar{suffix}" for suffix in ("", "+gzip", "+zstd"))},
}
INDEX_FILE = "index.json"
REF_NAME = "org.opencontainers.image.ref.name"
# What programs take for an entry's name: that of OCI, and containerd's.
TAGS = (REF_NAME, "io.containerd.image.name")
# More than a container can have: docker's overlay2 takes 128 (moby, daemon/graphdriver/overlay2, maxDepth).
MOST_LAYERS = 500
# Registries need not take manifests of more than 4 MB (distribution-spec 1.1, "Pushing Manifests").
DOCUMENT_BYTES = 16 << 20
# Programs in Go read keys without regard to case: a document must not mean one thing to them and another here.
_KEYS = {
    name.casefold(): name
    for name in (
        "schemaVersion", "manifests", "mediaType", "digest", "size", "urls", "annotations", "data", "artifactType",
        "platform", "subject", "architecture", "os", "os.version", "os.features", "variant",
    )
}  # fmt: skip


class _Document(BaseModel):
    """What others wrote: keys that are not known here are theirs, and null is as good as no value."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # Go writes null for an empty list or map: docker's Volumes and Entrypoint.
        return {key: field for key, field in value.items() if field is not None}


class _Listed(_Document):
    """A part of an index, by which programs choose an image."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_look_alikes(cls, value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if (known := _KEYS.get(key.casefold(), key)) != key:
                raise ValueError(f"it has a key {key!r}, which other programs read as {known!r}")
        return value


class Platform(_Listed):
    """What an image runs on."""

    os: str = ""
    architecture: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.os}/{self.architecture}" + (f"/{self.variant}" if self.variant else "")

    def is_for(self, platform: str) -> bool:
        """Whether it is a platform of a base. ARM has variants, of which 8 is the one that servers are."""
        # Variants of amd64 (v2, v3) are refused: their programs need instructions that not every node has.
        return f"{self.os}/{self.architecture}" == platform and self.variant in ("", "v8")


class Descriptor(_Listed):
    """What a document states about another one, or about a layer."""

    media_type: str = Field(default="", alias="mediaType")
    digest: Digest
    # Strict: pydantic also takes "12" and true for numbers, and other programs do not.
    size_bytes: int = Field(alias="size", ge=0, strict=True)
    platform: Platform | None = None
    artifact_type: str = Field(default="", alias="artifactType")
    annotations: dict[str, str] = Field(default_factory=dict)

    @property
    def tags(self) -> list[str]:
        return list(dict.fromkeys(self.annotations[name] for name in TAGS if name in self.annotations))


class Index(_Listed):
    """Images for several platforms; or the images of a layout."""

    manifests: tuple[Descriptor, ...]
    annotations: dict[str, str] = Field(default_factory=dict)


class Manifest(_Document):
    """An image: its configuration and its layers, lowest first; or a report about one (``subject``)."""

    artifact_type: str = Field(default="", alias="artifactType")
    config: Descriptor
    layers: tuple[Descriptor, ...] = Field(max_length=MOST_LAYERS)
    subject: Descriptor | None = None
    annotations: dict[str, str] = Field(default_factory=dict)


class RunConfig(_Document):
    """How a container of an image starts: what docker, enroot and Kubernetes read (``config`` of a configuration)."""

    environment: tuple[str, ...] = Field(default=(), validation_alias="Env")
    entrypoint: tuple[str, ...] = Field(default=(), validation_alias="Entrypoint")
    command: tuple[str, ...] = Field(default=(), validation_alias="Cmd")
    workdir: str = Field(default="", validation_alias="WorkingDir")
    labels: tuple[tuple[str, str], ...] = Field(default=(), validation_alias="Labels")
    volumes: tuple[str, ...] = Field(default=(), validation_alias="Volumes")
    user: str = Field(default="", validation_alias="User")
    ports: tuple[str, ...] = Field(default=(), validation_alias="ExposedPorts")
    stop_signal: str = Field(default="", validation_alias="StopSignal")

    @field_validator("labels", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return tuple(value.items()) if isinstance(value, dict) else value

    @field_validator("volumes", "ports", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        # Go has no sets: VOLUME and EXPOSE are maps to empty objects (image-spec, config.md).
        return tuple(sorted(value)) if isinstance(value, dict) else value

    @property
    def variables(self) -> dict[str, str]:
        """The environment by name."""
        return {name: value for name, _, value in (entry.partition("=") for entry in self.environment)}

    def as_json(self) -> dict[str, Json]:
        """The object under ``config`` of an image's configuration; what is empty is left out."""
        values: dict[str, Json] = {
            "Env": self.environment,
            "Entrypoint": self.entrypoint,
            "Cmd": self.command,
            "WorkingDir": self.workdir,
            "Labels": dict(sorted(self.labels)),
            "Volumes": {path: {} for path in sorted(self.volumes)},
            "User": self.user,
            "ExposedPorts": {port: {} for port in sorted(self.ports)},
            "StopSignal": self.stop_signal,
        }
        return {key: value for key, value in values.items() if value}


class _Rootfs(_Document):
    diff_ids: tuple[str, ...]


class _Step(_Document):
    created_by: str = ""
    empty_layer: bool = False


class Configuration(_Document):
    os: str = ""
    architecture: str = ""
    variant: str = ""
    created: str | None = None
    rootfs: _Rootfs = _Rootfs(diff_ids=())
    run: RunConfig = Field(default=RunConfig(), validation_alias="config")
    history: tuple[_Step, ...] = ()

    @property
    def platform(self) -> Platform:
        return Platform(os=self.os, architecture=self.architecture, variant=self.variant)

    def layer_name(self, position: int) -> str:
        """What the history states about a layer."""
        # image-spec, config.md, "history": steps such as ENV have an entry and no layer.
        names = [step.created_by for step in self.history if not step.empty_layer]
        return names[position] if position < len(names) else ""


class BaseConfig(TomlModel):
    """What a base that is an image states about its containers, as records keep it."""

    environment: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    volumes: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    stop_signal: str = ""
    entrypoint: tuple[str, ...] = Field(default=(), description="not carried into images")


# Makes the error for a source that is refused: of its name, why, and how to go on.
Refuse = Callable[[str, str, str], CheckRefusedError]


def refused_as_base(name: str, why: str, fix: str = "") -> CheckRefusedError:
    """The error for an image that no base can be made of."""
    fix = fix or "Use another image, or write it anew with a tool that keeps to the OCI image specification (skopeo)."
    return CheckRefusedError(f"{name} is refused as a base", why=printable(why), fix=fix)


def not_an_image(name: str, why: str, fix: str = "") -> CheckRefusedError:
    """The error for what cannot be read as an image."""
    fix = fix or (
        "Name a folder of out/images, an OCI layout (FOLDER or FOLDER:TAG), an archive of `docker save` or "
        "`skopeo copy`, or a .sqsh file. If it is one, it is damaged: copy or build it again."
    )
    # It may name what the image holds; what a tool printed has several lines.
    return CheckRefusedError(
        f"{name} cannot be read as an image", why="\n".join(map(printable, why.split("\n"))), fix=fix
    )


def not_of_envbuild(name: str, why: str, fix: str = "") -> CheckRefusedError:
    """The error for what a registry has in the place of a document."""
    fix = fix or "Somebody wrote something else there: remove it, and publish the image again."
    return CheckRefusedError(f"{name} is refused", why="\n".join(map(printable, why.split("\n"))), fix=fix)


def read(raw: bytes, model: type[M], name: str, refuse: Refuse = refused_as_base) -> M:
    """A document as its model.

    Raises:
        CheckRefusedError: it is not what it should be.
    """
    what = model.__name__.lower()
    try:
        return model.model_validate(jsonread.loads(raw))
    except ValidationError as error:
        # Without the input: a document of others may be large, and hold control characters.
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise refuse(name, f"Its {what} cannot be read: {place}: {first['msg']}.", "") from error
    except ValueError as error:
        raise refuse(name, f"Its {what} cannot be read: {error}", "") from error
