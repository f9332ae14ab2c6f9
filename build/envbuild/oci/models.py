"""The documents of an image (OCI image-spec 1.1, docker's image manifest 2.2), read and checked before their use."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from envbuild.catalog.fields import TomlModel
from envbuild.core.errors import CheckRefusedError
from envbuild.core.text import printable

M = TypeVar("M", bound=BaseModel)
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]

_OCI, _DOCKER = "application/vnd.oci.image.", "application/vnd.docker."
INDEX_TYPES = (f"{_OCI}index.v1+json", f"{_DOCKER}distribution.manifest.list.v2+json")
MANIFEST_TYPES = (f"{_OCI}manifest.v1+json", f"{_DOCKER}distribution.manifest.v2+json")
# Docker's names for layers, and OCI's for the same bytes, which is what an OCI manifest may hold.
LAYER_TYPES = {
    f"{_DOCKER}image.rootfs.diff.tar.gzip": f"{_OCI}layer.v1.tar+gzip",
    f"{_DOCKER}image.rootfs.diff.tar.zstd": f"{_OCI}layer.v1.tar+zstd",
    f"{_DOCKER}image.rootfs.diff.tar": f"{_OCI}layer.v1.tar",
    **{name: name for name in (f"{_OCI}layer.v1.tar{suffix}" for suffix in ("", "+gzip", "+zstd"))},
}
_ELSEWHERE = ("foreign", "nondistributable")
MOST_LAYERS = 500
DOCUMENT_BYTES = 8 << 20


class _Document(BaseModel):
    """What others wrote: keys that are not known here are theirs."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)


class Platform(_Document):
    """What an image runs on."""

    os: str = ""
    architecture: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.os}/{self.architecture}" + (f"/{self.variant}" if self.variant else "")

    def is_for(self, platform: str) -> bool:
        """Whether it is a platform of a base. ARM has variants, of which 8 is the one that servers are."""
        return f"{self.os}/{self.architecture}" == platform and self.variant in ("", "v8")


class Descriptor(_Document):
    """What a document says of another one, or of a layer."""

    media_type: str = Field(default="", alias="mediaType")
    digest: Digest
    size_bytes: int = Field(alias="size", ge=0)
    platform: Platform | None = None
    annotations: dict[str, str] = Field(default_factory=dict)


class Index(_Document):
    """Images for several platforms; or the images of a layout."""

    media_type: str = Field(default="", alias="mediaType")
    manifests: tuple[Descriptor, ...]


class Manifest(_Document):
    """An image: its configuration and its layers, lowest first."""

    media_type: str = Field(default="", alias="mediaType")
    config: Descriptor
    layers: tuple[Descriptor, ...] = Field(min_length=1, max_length=MOST_LAYERS)


class _Rootfs(_Document):
    diff_ids: tuple[Digest, ...]


class BaseConfig(TomlModel):
    """What a base that is an image says about its containers."""

    environment: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    volumes: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    stop_signal: str = ""
    entrypoint: tuple[str, ...] = Field(default=(), description="not carried into images")


class _Start(_Document):
    environment: tuple[str, ...] | None = Field(default=None, alias="Env")
    labels: dict[str, str] | None = Field(default=None, alias="Labels")
    user: str | None = Field(default=None, alias="User")
    workdir: str | None = Field(default=None, alias="WorkingDir")
    volumes: dict[str, object] | None = Field(default=None, alias="Volumes")
    ports: dict[str, object] | None = Field(default=None, alias="ExposedPorts")
    stop_signal: str | None = Field(default=None, alias="StopSignal")
    entrypoint: tuple[str, ...] | None = Field(default=None, alias="Entrypoint")


class Configuration(_Document):
    """An image's configuration."""

    os: str = ""
    architecture: str = ""
    variant: str = ""
    rootfs: _Rootfs
    start: _Start | None = Field(default=None, alias="config")

    @property
    def platform(self) -> Platform:
        return Platform(os=self.os, architecture=self.architecture, variant=self.variant)


def read(raw: bytes, model: type[M], name: str) -> M:
    """A document as its model.

    Raises:
        CheckRefusedError: it is not what it should be.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise refused(name, f"Its {model.__name__.lower()} cannot be read: {place}: {first['msg']}.") from error


def refused(name: str, why: str, fix: str = "") -> CheckRefusedError:
    """The error for an image that no base can be."""
    fix = fix or "Use another image, or write it anew with a tool that keeps to the OCI image specification (skopeo)."
    return CheckRefusedError(f"{name} is refused as a base", why=printable(why), fix=fix)


def choose(index: Index, platform: str, name: str) -> Descriptor:
    """The image for a platform.

    Raises:
        CheckRefusedError: there is none.
    """
    for entry in index.manifests:
        if entry.platform is not None and entry.platform.is_for(platform):
            return entry
    known = sorted({str(entry.platform) for entry in index.manifests if entry.platform and entry.platform.os})
    raise refused(
        name,
        f"The base is for {platform}; the image is for {', '.join(known) or 'no platform that it names'}.",
        "Correct the base's platform, or choose an image that is made for it.",
    )


def check_layers(manifest: Manifest, configuration: Configuration, platform: str, name: str) -> None:
    """Refuse an image for another platform, and layers that cannot be taken.

    Raises:
        CheckRefusedError: says which and why.
    """
    if not configuration.platform.is_for(platform):
        raise refused(
            name,
            f"The base is for {platform}; the image is for {configuration.platform}.",
            "Correct the base's platform, or choose an image that is made for it.",
        )
    for layer in manifest.layers:
        if any(f".{word}." in layer.media_type for word in _ELSEWHERE):
            raise refused(
                name,
                f"Its layer {layer.digest} is a foreign one ({layer.media_type}): no registry holds it, and its "
                "licence forbids to hand it on, as every image on this base would.",
                "Use an image whose layers are all its registry's own.",
            )
        if layer.media_type not in LAYER_TYPES:
            raise refused(name, f"Its layer {layer.digest} is of the unknown type {layer.media_type!r}.")
    count = len(configuration.rootfs.diff_ids)
    if count != len(manifest.layers):
        raise refused(name, f"Its manifest has {len(manifest.layers)} layers, and its configuration {count}.")


def base_config(configuration: Configuration, name: str) -> BaseConfig:
    """How containers of an image start.

    Raises:
        CheckRefusedError: a variable cannot be written into the files that containers read.
    """
    start = configuration.start or _Start()
    environment = {}
    for entry in start.environment or ():
        variable, equals, value = entry.partition("=")
        # enroot's /etc/environment has a variable a line.
        if not equals or not variable or any(character in entry for character in "\n\r\0"):
            raise refused(name, f"Its variable {variable[:80]!r} has no value, no name, or a line break in it.")
        environment[variable] = value
    for word in (start.workdir or "", start.user or "", *(start.volumes or {}), *(start.ports or {})):
        if any(character in word for character in "\n\r\0"):
            raise refused(name, f"Its configuration has a line break in {word[:80]!r}.")
    return BaseConfig(
        environment=environment,
        labels=start.labels or {},
        user=start.user or "",
        workdir=start.workdir or "",
        volumes=tuple(sorted(start.volumes or {})),
        ports=tuple(sorted(start.ports or {})),
        stop_signal=start.stop_signal or "",
        entrypoint=start.entrypoint or (),
    )
