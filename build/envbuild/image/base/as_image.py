"""A base as an image of its own, known by the digest of its manifest: so it is published, and taken again.

The same layers give the same images on top of them. mmdebstrap gives other layers each day, so a lock names the base it
was verified on by this digest.
"""

from __future__ import annotations

from envbuild.image.base.imported import ImportedBase
from envbuild.image.record import BaseRecord
from envbuild.oci.models import RunConfig
from envbuild.oci.pull import FoundImage
from envbuild.oci.write import LAYER_OF, OciImage, make_oci
from envbuild.rootfs.layer import Layer
from envbuild.rootfs.layer_writer import EPOCH

MADE_BY = "org.envbuild.base.made-by"
# What the base is itself made from (OCI image-spec, annotations.md).
NAME, DIGEST = "org.opencontainers.image.base.name", "org.opencontainers.image.base.digest"


def base_image(record: BaseRecord, platform: str) -> OciImage:
    """The image that a base is; the same for the same layers and record."""
    config = record.config
    run = RunConfig(
        environment=tuple(f"{name}={value}" for name, value in config.environment.items()),
        entrypoint=config.entrypoint,
        workdir=config.workdir,
        labels=tuple(config.labels.items()),
        volumes=config.volumes,
        user=config.user,
        ports=config.ports,
        stop_signal=config.stop_signal,
    )
    stated = {MADE_BY: record.made_by, NAME: record.name, DIGEST: record.digest}
    return make_oci(run, platform, record.layers, EPOCH, {key: value for key, value in stated.items() if value})


def base_tag(name: str, digest: str) -> str:
    """The tag of a published base."""
    return f"base-{name}-{digest.removeprefix('sha256:')[:12]}"


def taken_again(image: FoundImage, layers: list[Layer]) -> ImportedBase:
    """The base that an image is, with the names and sources that it had where it was made.

    Args:
        layers: of the image, lowest first.
    """
    annotations = image.annotations
    named = [
        Layer(layer.record.model_copy(update={"name": stated.removeprefix(LAYER_OF) or layer.record.name}), layer.file)
        for layer, stated in zip(layers, image.history, strict=True)
    ]
    return ImportedBase(
        layers=named,
        config=image.config,
        made_by=annotations.get(MADE_BY, image.name),
        name=annotations.get(NAME, ""),
        digest=annotations.get(DIGEST, ""),
    )
