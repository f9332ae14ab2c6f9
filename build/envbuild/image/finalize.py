"""The steps on a finished OCI layout: the .sqsh, the SBOMs and the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.base import Mmdebstrap
from envbuild.catalog.context import Context
from envbuild.image import node_requirements
from envbuild.image.checks.contents import ImageContents
from envbuild.image.configuration import run_config, write_configuration
from envbuild.image.inputs import ImageParts
from envbuild.image.layers.sandbox import VENV
from envbuild.image.output import OCI_DIR, SQSH_FILE
from envbuild.image.record import CheckRecord, ImageRecord, ReferrerRecord, SqshRecord
from envbuild.image.sbom.inventory import inventory
from envbuild.image.sbom.reports import attach, reports_of
from envbuild.image.scan.scan import CachedScan
from envbuild.image.squashfs.pack import SqshSource, write_sqsh
from envbuild.lock.record.content import timestamp
from envbuild.lock.uv.program import uv_version
from envbuild.oci.models import RunConfig
from envbuild.oci.write import OciImage, make_oci, write_layout
from envbuild.rootfs import gzip_writer
from envbuild.rootfs.layer import Layer
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.cache.wheelhouse import Built


@dataclass(frozen=True, kw_only=True)
class WrittenImage:
    """An image whose OCI layout is written: its layers, lowest first, and how its containers start."""

    oci: OciImage
    layers: Sequence[Layer]
    config: RunConfig


def write_oci(folder: Path, parts: ImageParts, context: Context) -> WrittenImage:
    """Write the uppermost layer, and the OCI layout with all layers as hard links."""
    lock = parts.inputs.lock.lock
    with context.reporter.step("write the OCI layout"):
        # Next to the entry, in the staging folder: the layout gets a hard link, and this name goes with that folder.
        file = folder.parent / "configuration.tar.gz"
        layers = [*parts.base.layers, *parts.environment.layers, Layer(write_configuration(file, parts), file)]
        config = run_config(parts)
        platform = parts.inputs.selection.base.platform
        oci = make_oci(config, platform, [layer.record for layer in layers], lock.source_date_epoch)
        write_layout(folder / OCI_DIR, oci, layers, tag=lock.stack)
    return WrittenImage(oci=oci, layers=layers, config=config)


def image_contents(parts: ImageParts, config: RunConfig, scans: tuple[CachedScan, ...]) -> ImageContents:
    """What the checks of the finished image read."""
    selection = parts.inputs.selection
    # Findings in the layers of an image that others made are reported only: who builds on it cannot cure them.
    made = isinstance(selection.base.obtain, Mmdebstrap)
    return ImageContents(
        layers=scans,
        variables=config.variables,
        labels=dict(config.labels),
        of_base=frozenset() if made else frozenset(layer.record.digest for layer in parts.base.layers),
        sm=selection.target.sm,
        compiled=_compiled_for(parts.inputs.wheels),
        loaded=parts.environment.record.loaded,
        environment=VENV,
        provided=frozenset(selection.base.provides),
    )


def _compiled_for(wheels: Mapping[str, Built]) -> dict[str, Architectures]:
    """The architectures that each wheel of the wheelhouse must contain."""
    needed = [built.record.parts for built in wheels.values()]
    return {parts.package: Architectures.named(parts.sm, parts.ptx) for parts in needed}


def pack_sqsh(folder: Path, parts: ImageParts, image: WrittenImage, context: Context, log: Path) -> SqshRecord | None:
    """Pack the .sqsh; None where none is wanted."""
    if not parts.inputs.with_sqsh:
        return None
    # The digest of the tar in a layer is not compared: that of the blob is, and both were taken of the same bytes.
    blobs = [replace(layer.blob, diff_id=None) for layer in image.layers]
    epoch, compression = parts.inputs.lock.lock.source_date_epoch, parts.inputs.packing.compression
    source = SqshSource(layers=blobs, config=image.config, provenance=f"oci:{image.oci.digest}", epoch=epoch)
    with context.reporter.step(f"pack the .sqsh with {compression}"):
        return write_sqsh(folder / SQSH_FILE, source, log, compression)


def make_record(
    key: str, parts: ImageParts, image: WrittenImage, sqsh: SqshRecord | None, checks: Mapping[str, CheckRecord]
) -> ImageRecord:
    """The record of an image, without its reports."""
    inputs, base, environment = parts.inputs, parts.base, parts.environment.record
    lock = inputs.lock.lock
    return ImageRecord(
        key=key,
        stack=lock.stack,
        base=inputs.selection.base_name,
        target=inputs.selection.target_name,
        hardware=node_requirements.hardware_of(inputs.selection.target),
        lock_digest=lock.digest,
        source_date_epoch=lock.source_date_epoch,
        oci_digest=image.oci.digest,
        config_digest=image.oci.config_digest,
        layers=tuple(layer.record for layer in image.layers),
        sqsh=sqsh,
        python=f"{VENV}/bin/python",
        environment=image.config.environment,
        base_digest=base.digest,
        base_made_by=base.record.made_by,
        base_packages=base.record.packages,
        packages=environment.packages,
        components=tuple(sorted(name for name, component in lock.components.items() if not component.transitive)),
        not_checked=environment.not_checked,
        wheels={name: component.record.digest for name, component in inputs.wheels.items()},
        checks={**checks},
        uv=uv_version(),
        gzip=gzip_writer.ENCODER,
    )


def write_reports(
    folder: Path, parts: ImageParts, record: ImageRecord, scans: Sequence[CachedScan]
) -> tuple[ReferrerRecord, ...]:
    """Write an image's SBOMs and provenance into ``folder``, and attach them to its OCI layout."""
    inputs = parts.inputs
    packages = inventory(inputs.lock, [layer.scan for layer in scans], VENV.strip("/"), inputs.wheels)
    created = timestamp(record.source_date_epoch)
    return attach(folder / OCI_DIR, folder, reports_of(record, packages), created)
