"""The end of every build: the finished layers are read, checked and reported on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from envbuild.image.layers.sandbox import INSIDE
from envbuild.image.record import ImageRecord, ReferrerRecord
from envbuild.image.sbom.inventory import inventory
from envbuild.image.sbom.referrers import attach
from envbuild.image.sbom.subject import ImageSubject
from envbuild.image.sbom.write import reports_of
from envbuild.image.scan.cache import CachedScan, scan_built_layer
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.record.cyclonedx import timestamp
from envbuild.rootfs.layer import Layer
from envbuild.store.local import LocalStore
from envbuild.wheels.architectures import Architectures
from envbuild.wheels.cache.entry import wanted
from envbuild.wheels.cache.wheelhouse import Built

# A shorter path is a word that files may have for their own reasons (/cache, /root).
LEAST_PARTS = 3


def scan_layers(layers: Sequence[Layer], store: LocalStore) -> tuple[CachedScan, ...]:
    """What is in each layer; layers that were read before are not read again."""
    paths = builder_paths(store)
    return tuple(scan_built_layer(layer, paths, store) for layer in layers)


def builder_paths(store: LocalStore) -> tuple[str, ...]:
    """Folders of the building machine that no file of an image may name."""
    root = store.root.resolve()
    return (INSIDE, *([str(root)] if len(root.parts) >= LEAST_PARTS else []))


def compiled_for(wheels: Mapping[str, Built]) -> dict[str, Architectures]:
    """What each wheel of the wheelhouse must contain."""
    return {item.record.parts.package: _ordered(wanted(item.record.parts)) for item in wheels.values()}


def _ordered(found: Architectures) -> Architectures:
    return Architectures.of(found.sass, found.ptx)


def write_reports(
    folder: Path,
    layout: Path,
    record: ImageRecord,
    lock: LockDirectory,
    scans: Sequence[CachedScan],
    wheels: Mapping[str, Built],
) -> tuple[ReferrerRecord, ...]:
    """Write an image's SBOMs and provenance into ``folder``, and attach them to its OCI layout."""
    venv = record.python.removesuffix("/bin/python").strip("/")
    subject = ImageSubject(
        stack=record.stack,
        base=record.base,
        hardware=record.hardware,
        digest=record.oci_digest,
        sqsh=record.sqsh_digest or "",
        lock_digest=record.lock_digest,
        base_digest=record.base_digest,
        epoch=record.source_date_epoch,
        packages=inventory(lock, [item.scan for item in scans], venv, wheels),
    )
    tools = {"uv": record.uv, "gzip": record.gzip, "base": record.base_made_by}
    if record.sqsh:
        tools |= {"sqsh": f"{record.sqsh.packed_by}, {record.sqsh.compression}"}
    return attach(layout, folder, reports_of(subject, record.key, tools), timestamp(record.source_date_epoch))
