"""The index of an OCI layout: which entry is the image, and that every other one is about it.

What copies an image by its tag (skopeo, podman, docker) looks at the annotation alone, whatever else the entry states,
and where an entry is an index it looks at the platforms. So an entry is passed over only where nothing could
take it for the image: its manifest states that it is a report about it, and it has neither tag nor platform.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from envbuild.core.errors import CheckRefusedError
from envbuild.core.text import printable
from envbuild.oci.files import ImageFiles
from envbuild.oci.models import INDEX_FILE, INDEX_TYPES, MANIFEST_TYPES, REF_NAME, Descriptor, Index, Manifest


@dataclass(frozen=True)
class IndexEntry:
    """An entry of an index.

    Attributes:
        document: its blob; None where it was not read: it is not a manifest, or has another tag than the wanted one.
    """

    descriptor: Descriptor
    document: Manifest | Index | None

    @property
    def digest(self) -> str:
        return self.descriptor.digest

    @property
    def manifest(self) -> Manifest | None:
        return self.document if isinstance(self.document, Manifest) else None

    @property
    def artifact_type(self) -> str:
        """What kind of report it claims to be."""
        return self.descriptor.artifact_type or (self.manifest.artifact_type if self.manifest else "")

    @property
    def system(self) -> str | None:
        return self.descriptor.platform.os if self.descriptor.platform else None

    @property
    def subject(self) -> str | None:
        """The digest of what its manifest is about."""
        return self.manifest.subject.digest if self.manifest and self.manifest.subject else None

    @property
    def may_be_image(self) -> bool:
        """Whether it is an image as far as it states itself."""
        return self.document is not None and not self.artifact_type

    def not_about(self, subjects: Sequence[str]) -> str:
        """Why it cannot be passed over as something about one of these digests; empty where it can."""
        if self.descriptor.tags:
            return f"it has the tag {', '.join(map(repr, self.descriptor.tags))}, and a report has none"
        if self.system == "unknown":  # the attestations of BuildKit
            return ""
        if self.system is not None:
            return "it has a platform, as an image has"
        if self.manifest is None:
            return f"its media type is {self.descriptor.media_type!r}"
        if not self.manifest.artifact_type:
            return "its manifest is that of no report (it has no artifactType)"
        return "" if self.subject in subjects else f"it is about {self.subject or 'no image'}"


@dataclass(frozen=True)
class FoundManifest:
    """The image of a layout, and what is listed with it that is about it."""

    digest: str
    manifest: Manifest
    reports: tuple[IndexEntry, ...]


def find_tagged(files: ImageFiles, tag: str) -> FoundManifest:
    """The image with a tag; without one the only image, where nothing but its reports is listed with it.

    Raises:
        CheckRefusedError: there is none, there are several, or an entry is neither the image nor about it.
    """
    entries = _entries(files, files.parse(INDEX_FILE, Index), tag)
    image = listed = _choose(files, entries, tag)
    # A report may be about the index that holds the image, or about the image itself.
    subjects = [listed.digest]
    # An index in the index: how BuildKit's OCI exporter writes an image with attestations, one entry for each platform.
    # It ends: an index names the next one by its digest, so none leads back to one before it.
    while isinstance(image.document, Index):
        inner = _entries(files, image.document, "")
        image = _choose(files, inner, "")
        subjects.append(image.digest)
        _refuse_strays(files, inner, image, subjects)
    # With a tag, other entries may be other images: what copies by the tag does not look at them.
    if not tag:
        _refuse_strays(files, entries, listed, subjects)
    reports = (entry for entry in entries if entry.subject == image.digest and not entry.not_about([image.digest]))
    if image.manifest is None:
        raise files.refused(f"{image.digest} is not a manifest.")
    return FoundManifest(image.digest, image.manifest, tuple(reports))


def only_digest(files: ImageFiles, tag: str | None) -> str:
    """The digest of the image with a tag in a layout's index, or of the only one, whatever platforms it is for.

    Raises:
        CheckRefusedError: there is none, or there are several.
    """
    index = files.parse(INDEX_FILE, Index)
    if not index.manifests:
        raise files.refused(f"Its {INDEX_FILE} lists no image.")
    tags = [(entry.annotations.get(REF_NAME, ""), entry.digest) for entry in index.manifests]
    digests = {digest for known, digest in tags if tag in (None, known)}
    if len(digests) == 1:
        return digests.pop()
    known = ", ".join(sorted(known or "(without a tag)" for known, _ in tags))
    why = "It has no image with this tag" if not digests else "It has several images"
    raise CheckRefusedError(
        f"{files.name} does not state which image the base is",
        why=printable(f"{why}; tags in it: {known}."),
        fix='Name one of them under [obtain] of the base: tag = "..."',
    )


def _entries(files: ImageFiles, index: Index, tag: str) -> list[IndexEntry]:
    """What an index lists; where a tag is wanted, the blobs under others are not read."""
    entries = []
    for descriptor in index.manifests:
        entry = IndexEntry(descriptor, None)
        # BuildKit's attestations have the platform unknown/unknown (its docs, "Attestation storage"), and are no
        # image's.
        if (not (tag and descriptor.tags) or tag in descriptor.tags) and entry.system != "unknown":
            if descriptor.media_type in INDEX_TYPES:
                entry = IndexEntry(descriptor, files.blob(descriptor, Index))
            elif descriptor.media_type in MANIFEST_TYPES:
                entry = IndexEntry(descriptor, files.blob(descriptor, Manifest))
        entries.append(entry)
    return entries


def _choose(files: ImageFiles, entries: Sequence[IndexEntry], tag: str) -> IndexEntry:
    if tag:
        images = [entry for entry in entries if tag in entry.descriptor.tags]
    else:
        images = [entry for entry in entries if entry.may_be_image]
    # The same image may be listed several times, once for each of its tags.
    different = {(entry.digest, entry.descriptor.media_type) for entry in images}
    if len(different) != 1:
        tags = [", ".join(entry.descriptor.tags) or entry.digest for entry in entries]
        wanted = f" with tag {tag!r}" if tag else ""
        raise files.refused(f"It has {len(different)} images{wanted}; in it are: {', '.join(tags) or 'none'}.")
    if not images[0].may_be_image:
        kind = images[0].artifact_type or f"media type {images[0].descriptor.media_type}"
        raise _misleading(files, f"Tag {tag!r} is that of {images[0].digest}, which is not an image ({kind}).")
    return images[0]


def _refuse_strays(
    files: ImageFiles, entries: Iterable[IndexEntry], image: IndexEntry, subjects: Sequence[str]
) -> None:
    for entry in entries:
        if entry.digest != image.digest and (why := entry.not_about(subjects)):
            raise _misleading(
                files, f"{entry.digest} is neither the image, {image.digest}, nor a report about it: {why}."
            )


def _misleading(files: ImageFiles, why: str) -> CheckRefusedError:
    return CheckRefusedError(
        f"the {INDEX_FILE} of {files.name} is refused",
        why=printable(why),
        fix="What copies the image by its tag may take another image than the one that is read here. Get the image "
        "again from where it was built; where several are to be in one layout, name the one that you mean: FOLDER:TAG.",
    )
