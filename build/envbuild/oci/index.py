"""The index of an OCI layout: which entry is the image, and that every other one is about it.

What copies an image by its tag (skopeo, podman, docker) looks at the annotation alone, whatever else the entry says of
itself, and where an entry is an index it looks at the platforms. So an entry is passed over only where nothing could
take it for the image: its manifest says that it is a report about it, and it has neither tag nor platform.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envbuild.core.digests import sha256_file
from envbuild.core.errors import CheckRefusedError
from envbuild.core.text import printable
from envbuild.oci.files import ImageFiles, blob_path, document, file_of
from envbuild.oci.opened import not_an_image
from envbuild.oci.write import INDEX_FILE, MANIFEST_TYPE, REF_NAME

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
KNOWN_TYPES = (MANIFEST_TYPE, DOCKER_MANIFEST, *INDEX_TYPES)
# What programs take for an entry's name: that of OCI, and containerd's.
TAGS = (REF_NAME, "io.containerd.image.name")
# Programs in Go read keys without regard to case: an index must not say one thing to them and another to us.
KEYS = {
    name.casefold(): name
    for name in (
        "schemaVersion", "manifests", "mediaType", "digest", "size", "urls", "annotations", "data", "artifactType",
        "platform", "subject", "architecture", "os", "os.version", "os.features", "variant",
    )
}  # fmt: skip


@dataclass(frozen=True)
class IndexEntry:
    """An entry of an index.

    Attributes:
        manifest: its blob; None where it was not read, being no manifest or not in question.
    """

    descriptor: Mapping[str, Any]
    manifest: Mapping[str, Any] | None

    @property
    def digest(self) -> str:
        return str(self.descriptor.get("digest"))

    @property
    def media_type(self) -> object:
        return self.descriptor.get("mediaType")

    @property
    def artifact_type(self) -> str:
        """What kind of report it says it is."""
        return str(self.descriptor.get("artifactType") or (self.manifest or {}).get("artifactType") or "")

    @property
    def tags(self) -> list[str]:
        found = self.descriptor.get("annotations") or {}
        return list(dict.fromkeys(str(found[name]) for name in TAGS if name in found))

    @property
    def system(self) -> object:
        """The operating system of its platform."""
        return (self.descriptor.get("platform") or {}).get("os")

    @property
    def subject(self) -> object:
        """The digest of what its manifest is about; None where it is about nothing else."""
        found = (self.manifest or {}).get("subject")
        return found.get("digest") if isinstance(found, dict) else None

    def not_about(self, subjects: Sequence[str]) -> str:
        """Why it cannot be passed over as something about one of these digests, in words; empty where it can."""
        if self.tags:
            return f"it has the tag {', '.join(map(repr, self.tags))}, and a report has none"
        if self.system == "unknown":  # the attestations of BuildKit
            return ""
        if self.system is not None:
            return "it has a platform, as an image has"
        if self.manifest is None or self.media_type in INDEX_TYPES:
            return f"its media type is {self.media_type!r}"
        if not self.manifest.get("artifactType"):
            return "its manifest is that of no report (it has no artifactType)"
        return "" if self.subject in subjects else f"it is about {self.subject or 'no image'}"

    @property
    def may_be_image(self) -> bool:
        """Whether it is an image as far as it says itself."""
        return self.manifest is not None and not self.artifact_type


@dataclass(frozen=True)
class FoundManifest:
    """The image of a layout, and what is listed with it that is about it."""

    image: IndexEntry
    reports: tuple[IndexEntry, ...]


def find_image(place: ImageFiles, tag: str) -> FoundManifest:
    """The image with a tag; without one the only image, with nothing but its reports beside it.

    Raises:
        CheckRefusedError: there is none, there are several, or an entry is neither the image nor about it.
    """
    entries = _entries(place, document(place, INDEX_FILE), tag)
    image = listed = _chosen(place, entries, tag)
    subjects = [listed.digest]
    while image.media_type in INDEX_TYPES:
        inner = _entries(place, image.manifest, "")
        image = _chosen(place, inner, "")
        subjects.append(image.digest)
        _refuse_strays(place, inner, image, subjects)
    if not tag:
        _refuse_strays(place, entries, listed, subjects)
    reports = (entry for entry in entries if entry.subject == image.digest and not entry.not_about([image.digest]))
    return FoundManifest(image, tuple(reports))


def _entries(place: ImageFiles, index: object, tag: str) -> list[IndexEntry]:
    """What an index lists; where a tag is asked for, the blobs under others are not looked at."""
    _refuse_look_alikes(place, index)
    found = []
    for item in items(place, index, "manifests"):
        if not isinstance(item, dict):
            raise not_an_image(place.source, f"{INDEX_FILE} has an entry {item!r:.80} that is no object.")
        for name in ("annotations", "platform"):
            if not isinstance(item.get(name) or {}, dict):
                raise not_an_image(place.source, f"{INDEX_FILE}: {name} of an entry is no object.")
        _refuse_look_alikes(place, item)
        _refuse_look_alikes(place, item.get("platform"))
        entry = IndexEntry(item, None)
        in_question = not (tag and entry.tags) or tag in entry.tags
        if in_question and entry.media_type in KNOWN_TYPES and entry.system != "unknown":
            entry = IndexEntry(item, blob(place, item))
        found.append(entry)
    return found


def _refuse_look_alikes(place: ImageFiles, value: object) -> None:
    for key in value if isinstance(value, dict) else ():
        if KEYS.get(key.casefold(), key) != key:
            known = KEYS[key.casefold()]
            raise not_an_image(place.source, f"{INDEX_FILE} has a key {key!r}, which other programs read as {known!r}.")


def _chosen(place: ImageFiles, entries: Sequence[IndexEntry], tag: str) -> IndexEntry:
    if tag:
        images = [entry for entry in entries if tag in entry.tags]
    else:
        images = [entry for entry in entries if entry.may_be_image]
    different = {(entry.digest, str(entry.media_type)) for entry in images}
    if len(different) != 1:
        tags = [", ".join(entry.tags) or entry.digest for entry in entries]
        asked = f" with tag {tag!r}" if tag else ""
        raise not_an_image(
            place.source, f"It has {len(different)} images{asked}; in it are: {', '.join(tags) or 'none'}."
        )
    if not images[0].may_be_image:
        kind = images[0].artifact_type or f"media type {images[0].media_type}"
        raise _misleading(place, f"Tag {tag!r} is that of {images[0].digest}, which is no image ({kind}).")
    return images[0]


def _refuse_strays(
    place: ImageFiles, entries: Iterable[IndexEntry], image: IndexEntry, subjects: Sequence[str]
) -> None:
    for entry in entries:
        if entry.digest != image.digest and (why := entry.not_about(subjects)):
            raise _misleading(
                place, f"{entry.digest} is neither the image, {image.digest}, nor a report about it: {why}."
            )


def _misleading(place: ImageFiles, why: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"the {INDEX_FILE} of {place.source} is refused",
        why=printable(why),
        fix="What copies the image by its tag may take something else than is looked at here. Get the image again from "
        "where it was built; where several are to be in one layout, name the one that you mean: FOLDER:TAG.",
    )


def items(place: ImageFiles, value: object, key: str) -> list[Any]:
    """The list under a key, which must be there."""
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise not_an_image(place.source, f"{key} is no list.")
    return found


def hold(place: ImageFiles, descriptor: object) -> str:
    """Where a blob lies, which has the digest by which it is named."""
    if not isinstance(descriptor, dict):
        raise not_an_image(place.source, f"It has no descriptor where one must be, but {descriptor!r}.")
    path = blob_path(place, descriptor.get("digest"))
    if (found := sha256_file(file_of(place, path))) != descriptor["digest"]:
        raise not_an_image(place.source, f"{path} has the digest {found}.")
    return path


def blob(place: ImageFiles, descriptor: object) -> dict[str, Any]:
    """A JSON blob, which has the digest by which it is named."""
    path = hold(place, descriptor)
    content = document(place, path)
    if not isinstance(content, dict):
        raise not_an_image(place.source, f"{path} is no object.")
    return content
