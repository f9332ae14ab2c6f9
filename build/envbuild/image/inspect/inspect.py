"""What is in an image: packages, layers, configuration, and what decides it."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.utils import canonicalize_name

from envbuild.core.digests import Json, short
from envbuild.core.text import printable
from envbuild.image.inspect.open import OpenedImage
from envbuild.image.scan.scan import CachedScan, scan_layer
from envbuild.store.local import LocalStore


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """An image and what was read in its layers."""

    image: OpenedImage
    scans: tuple[CachedScan, ...]

    @property
    def python(self) -> dict[str, str]:
        """Version by name of each Python package: the environment's own, else what lies elsewhere."""
        versions: dict[str, str] = {}
        # Lowest first: of two versions the upper one stays, and so that of the environment.
        for kept in self.scans:
            for package in kept.scan.python:
                # What a package brings along in itself (a folder _vendor) is that package's affair.
                if package.folder.split("/")[-2:-1] in (["site-packages"], ["dist-packages"]):
                    versions[package.name] = package.version
        return dict(sorted(versions.items()))

    @property
    def debian(self) -> dict[str, str]:
        """Version by name of each Debian package, as the uppermost layer with dpkg's status has them."""
        versions: dict[str, str] = {}
        for kept in self.scans:
            # A layer that installs a package has dpkg's whole status, so the uppermost is complete.
            if kept.scan.debian is not None:
                versions = {package.name: package.version for package in kept.scan.debian}
        return versions

    @property
    def components(self) -> dict[str, str]:
        """The stack's components with their versions."""
        python = self.python
        names = [str(canonicalize_name(name)) for name in self.image.components]
        return {name: python[name] for name in names if name in python}


def inspect_image(image: OpenedImage, builder_paths: tuple[str, ...], store: LocalStore) -> Inspected:
    """Read an image's layers, or what is known of them already.

    Raises:
        CheckRefusedError: a layer is damaged, or not the one that the manifest names.
    """
    scans = []
    for number, layer in enumerate(image.layers, start=1):
        name = layer.name or f"{number} of {len(image.layers)}"
        scans.append(scan_layer(name, layer.digest, layer.members, builder_paths, store, layer.check))
    return Inspected(image=image, scans=tuple(scans))


def as_json(inspected: Inspected) -> dict[str, Json]:
    """The object that ``--json`` prints."""
    image = inspected.image
    config = image.config
    return {
        "source": image.source,
        "kind": image.kind,
        # An archive of `docker save` and a .sqsh have no manifest.
        "digest": image.digest or None,
        "size_bytes": image.size_bytes,
        "platform": f"{config.os}/{config.architecture}" if config.os and config.architecture else None,
        "created": config.created,
        "components": {**inspected.components},
        "packages": {"python": {**inspected.python}, "debian": {**inspected.debian}},
        "layers": [
            {
                "name": kept.name,
                "digest": layer.digest,
                "size_bytes": layer.size_bytes,
                "unpacked_bytes": kept.scan.file_bytes,
                "files": kept.scan.files,
                "entries": kept.scan.entries,
                "share": round(layer.size_bytes / image.size_bytes, 4) if image.size_bytes else 0,
            }
            for layer, kept in zip(image.layers, inspected.scans, strict=True)
        ],
        "configuration": configuration(image),
        "decided_by": decided_by(image),
        "reports": [{"artifact_type": entry.artifact_type, "manifest_digest": entry.digest} for entry in image.reports],
        "checks": {name: entry.model_dump(mode="json") for name, entry in image.record.checks.items()}
        if image.record
        else {},
    }


def configuration(image: OpenedImage) -> dict[str, Json]:
    """How its containers start."""
    run = image.config.run
    return {
        "environment": {**image.variables},
        "labels": {**image.labels},
        "entrypoint": list(run.entrypoint) or None,
        "command": list(run.command) or None,
        "workdir": run.workdir or None,
        "user": run.user or None,
        "volumes": [*sorted(run.volumes)],
        "ports": [*sorted(run.ports)],
    }


def decided_by(image: OpenedImage) -> dict[str, Json]:
    """What the image was made from: envbuild's record, or else its labels."""
    record = image.record
    if record is None:
        return {name: value for name, value in image.labels.items() if name.startswith("envbuild.")}
    return {
        "key": record.key,
        "stack": record.stack,
        "base": record.base,
        "base_digest": record.base_digest,
        "base_made_by": record.base_made_by,
        "target": record.target,
        "lock": record.lock_digest,
        "source_date_epoch": record.source_date_epoch,
        "uv": record.uv,
        "gzip": record.gzip,
        "sqsh": f"{record.sqsh.packed_by}, {record.sqsh.compression}" if record.sqsh else None,
        "wheels": {**record.wheels},
    }


def lines(inspected: Inspected) -> list[str]:
    """The same for people."""
    image, components, python, debian = inspected.image, inspected.components, inspected.python, inspected.debian
    named = " ".join(filter(None, [image.source, image.digest]))
    decides = {name: value for name, value in decided_by(image).items() if value and isinstance(value, (str, int))}
    sections = {
        f"{named}  {megabytes(image.size_bytes)}": [f"{name} {value}" for name, value in decides.items()],
        "components:": [f"{name} {version}" for name, version in components.items()],
        f"Python packages ({len(python)}):": [f"{name} {python[name]}" for name in python if name not in components],
        f"Debian packages ({len(debian)}):": [f"{name} {version}" for name, version in debian.items()],
        "layers (files, size, unpacked, share):": _layer_lines(inspected),
        "environment:": [f"{name}={value}" for name, value in image.variables.items()],
        "labels:": [f"{name}={value}" for name, value in image.labels.items()],
    }
    return [
        line
        for title, under in sections.items()
        for line in (printable(title), *(f"  {printable(text)}" for text in under))
    ]


def _layer_lines(inspected: Inspected) -> list[str]:
    total = inspected.image.size_bytes or 1
    return [
        f"{short(layer.digest)}  {kept.scan.files:>7}  {megabytes(layer.size_bytes):>11}  "
        f"{megabytes(kept.scan.file_bytes):>11}  {layer.size_bytes / total:>6.1%}  {kept.name}"
        for layer, kept in zip(inspected.image.layers, inspected.scans, strict=True)
    ]


def megabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.1f} MB"
