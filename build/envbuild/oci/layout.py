"""OCI layouts and docker archives: index, manifest, configuration, layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from envbuild.core.digests import sha256_file
from envbuild.image.sbom.cyclonedx import MEDIA_TYPE as CYCLONEDX
from envbuild.oci.files import ImageFiles, blob_path, document, file_of
from envbuild.oci.index import IndexEntry, blob, find_image, hold, items
from envbuild.oci.opened import OpenedImage, OpenedLayer, not_an_image
from envbuild.rootfs.blobs import LayerBlob


def open_layout(place: ImageFiles, tag: str, kind: str) -> OpenedImage:
    """The image of an OCI layout: that with the tag, or the only one. What is listed with it is read whole.

    Raises:
        CheckRefusedError: there is none, there are several, it is damaged, or the index lists something beside it.
    """
    found = find_image(place, tag)
    manifest = found.image.manifest or {}
    config = blob(place, manifest.get("config"))
    names = _names(config)
    layers = []
    for position, item in enumerate(items(place, manifest, "layers")):
        if not isinstance(item, dict):
            raise not_an_image(place.source, f"It has no descriptor where one must be, but {item!r}.")
        layer = LayerBlob(
            file=file_of(place, blob_path(place, item.get("digest"))),
            digest=item["digest"],
            size_bytes=item.get("size"),
            media_type=None if item.get("mediaType") is None else str(item["mediaType"]),
        )
        layers.append(OpenedLayer.of(layer, names[position] if position < len(names) else ""))
    for report in found.reports:
        _hold_report(place, report)
    return OpenedImage(
        source=place.source,
        kind=kind,
        digest=found.image.digest,
        config=config,
        layers=tuple(layers),
        size_bytes=sum(item.size_bytes for item in layers),
        components=_components(place, found.reports),
        reports=tuple({"artifact_type": item.artifact_type, "manifest_digest": item.digest} for item in found.reports),
    )


def _hold_report(place: ImageFiles, report: IndexEntry) -> None:
    """Every blob of a report has the digest by which it is named, also the empty one that they share."""
    manifest = report.manifest or {}
    for descriptor in (manifest.get("config"), *items(place, manifest, "layers")):
        hold(place, descriptor)


def open_docker_archive(place: ImageFiles) -> OpenedImage:
    """The image of `docker save`: its layers are plain tars.

    Raises:
        CheckRefusedError: it has several images, or is damaged.
    """
    listed = document(place, "manifest.json")
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], dict):
        count = len(listed) if isinstance(listed, list) else 0
        raise not_an_image(place.source, f"manifest.json lists {count} images; one is looked at.")
    config = document(place, str(listed[0].get("Config")))
    names, diff_ids = _names(config), _diff_ids(config)
    layers = []
    for position, path in enumerate(items(place, listed[0], "Layers")):
        file = file_of(place, str(path))
        diff_id = diff_ids[position] if position < len(diff_ids) else None
        blob = LayerBlob(file=file, digest=sha256_file(file), diff_id=diff_id)
        layers.append(OpenedLayer.of(blob, names[position] if position < len(names) else "", hashed=True))
    size = sum(item.size_bytes for item in layers)
    return OpenedImage(
        source=place.source, kind="archive", digest="", config=config, layers=tuple(layers), size_bytes=size
    )


def _names(config: object) -> list[str]:
    """What the history says of each layer."""
    history = config.get("history") if isinstance(config, dict) else None
    steps: Iterable[Any] = history if isinstance(history, list) else ()
    return [str(step.get("created_by", "")) for step in steps if isinstance(step, dict) and not step.get("empty_layer")]


def _diff_ids(config: object) -> list[str]:
    """The digests of the layers' tars."""
    rootfs = config.get("rootfs") if isinstance(config, dict) else None
    found = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    return [str(item) for item in found] if isinstance(found, list) else []


def _components(place: ImageFiles, attached: Iterable[IndexEntry]) -> tuple[str, ...]:
    """The stack's components, as the attached SBOM has them."""
    for report in attached:
        if report.artifact_type == CYCLONEDX:
            layers = items(place, report.manifest, "layers")
            listed = items(place, blob(place, layers[0] if layers else None), "components")
            mark = {"name": "envbuild:component", "value": "true"}
            return tuple(str(item["name"]) for item in listed if mark in item.get("properties", []))
    return ()
