"""OCI layouts and docker archives: index, manifest, configuration, layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envbuild.core.digests import sha256_file
from envbuild.image.merging.blobs import LayerBlob
from envbuild.image.oci import MANIFEST_TYPE, REF_NAME
from envbuild.image.opening.blobs import Place, blob_path, document, file_of
from envbuild.image.opening.model import OpenedImage, OpenedLayer, not_an_image
from envbuild.image.reports.cyclonedx import MEDIA_TYPE as CYCLONEDX

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")


def open_layout(place: Place, tag: str, kind: str) -> OpenedImage:
    """The image of an OCI layout: that with the tag, or the only one.

    Raises:
        CheckRefusedError: there is none, there are several, or it is damaged.
    """
    entries = [entry for entry in _list(place, document(place, "index.json"), "manifests") if isinstance(entry, dict)]
    entry = _choose(place, entries, tag)
    while entry.get("mediaType") in INDEX_TYPES:
        nested = _list(place, _blob(place, entry), "manifests")
        entry = _choose(place, [item for item in nested if isinstance(item, dict)], "")
    manifest = _blob(place, entry)
    config = _blob(place, manifest.get("config"))
    names = _names(config)
    layers = []
    for position, item in enumerate(_list(place, manifest, "layers")):
        if not isinstance(item, dict):
            raise not_an_image(place.source, f"It has no descriptor where one must be, but {item!r}.")
        blob = LayerBlob(
            file=file_of(place, blob_path(place, item.get("digest"))),
            digest=item["digest"],
            size_bytes=item.get("size"),
            media_type=item.get("mediaType"),
        )
        layers.append(OpenedLayer.of(blob, names[position] if position < len(names) else ""))
    attached = _referrers(place, entries, str(entry["digest"]))
    return OpenedImage(
        source=place.source,
        kind=kind,
        digest=str(entry["digest"]),
        config=config,
        layers=tuple(layers),
        size_bytes=sum(item.size_bytes for item in layers),
        components=_components(place, attached),
        reports=tuple(
            {"artifact_type": item.get("artifactType", ""), "manifest_digest": item.get("digest", "")}
            for item in attached
        ),
    )


def open_docker_archive(place: Place) -> OpenedImage:
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
    for position, path in enumerate(_list(place, listed[0], "Layers")):
        file = file_of(place, str(path))
        diff_id = diff_ids[position] if position < len(diff_ids) else None
        blob = LayerBlob(file=file, digest=sha256_file(file), diff_id=diff_id)
        layers.append(OpenedLayer.of(blob, names[position] if position < len(names) else "", hashed=True))
    size = sum(item.size_bytes for item in layers)
    return OpenedImage(
        source=place.source, kind="archive", digest="", config=config, layers=tuple(layers), size_bytes=size
    )


def _choose(place: Place, entries: Sequence[Mapping[str, Any]], tag: str) -> Mapping[str, Any]:
    images = [entry for entry in entries if _is_image(entry)]
    if tag:
        images = [entry for entry in images if (entry.get("annotations") or {}).get(REF_NAME) == tag]
    if len(images) != 1:
        tags = [str((entry.get("annotations") or {}).get(REF_NAME, entry.get("digest"))) for entry in entries]
        asked = f" with tag {tag!r}" if tag else ""
        raise not_an_image(place.source, f"It has {len(images)} images{asked}; in it are: {', '.join(tags) or 'none'}.")
    return images[0]


def _is_image(entry: Mapping[str, Any]) -> bool:
    """Not an artifact that refers to one, and not the attestation that BuildKit puts beside one."""
    unknown = (entry.get("platform") or {}).get("os") == "unknown"
    known = entry.get("mediaType") in (MANIFEST_TYPE, DOCKER_MANIFEST, *INDEX_TYPES)
    return known and not entry.get("artifactType") and not unknown


def _blob(place: Place, descriptor: object) -> dict[str, Any]:
    """A JSON blob, which must have the digest by which it is named."""
    if not isinstance(descriptor, dict):
        raise not_an_image(place.source, f"It has no descriptor where one must be, but {descriptor!r}.")
    path = blob_path(place, descriptor.get("digest"))
    if (found := sha256_file(file_of(place, path))) != descriptor["digest"]:
        raise not_an_image(place.source, f"{path} has the digest {found}.")
    content = document(place, path)
    if not isinstance(content, dict):
        raise not_an_image(place.source, f"{path} is no object.")
    return content


def _list(place: Place, value: object, key: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise not_an_image(place.source, f"{key} is no list.")
    return found


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


def _referrers(place: Place, entries: Iterable[Mapping[str, Any]], digest: str) -> list[Mapping[str, Any]]:
    """The index's artifacts that refer to the image."""
    found = []
    for entry in entries:
        if entry.get("artifactType"):
            subject = _blob(place, entry).get("subject")
            if isinstance(subject, dict) and subject.get("digest") == digest:
                found.append(entry)
    return found


def _components(place: Place, attached: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The stack's components, as the attached SBOM has them."""
    for entry in attached:
        if entry.get("artifactType") == CYCLONEDX:
            layers = _list(place, _blob(place, entry), "layers")
            listed = _list(place, _blob(place, layers[0] if layers else None), "components")
            mark = {"name": "envbuild:component", "value": "true"}
            return tuple(str(item["name"]) for item in listed if mark in item.get("properties", []))
    return ()
