"""The records of publications: each under a tag of its own, which says what was published, or that it was taken back.

What an index has is put back from them; whoever may push can write other things there.
"""

from __future__ import annotations

from pydantic import Field

from envbuild.core.digests import Json
from envbuild.core.errors import CheckRefusedError
from envbuild.core.text import quoted_command
from envbuild.oci.artifact import EMPTY_DESCRIPTOR, artifact_manifest
from envbuild.oci.models import MANIFEST_TYPE, Manifest, not_of_envbuild, read
from envbuild.oci.push import RegistryManifest, digest_of_tag, read_manifest
from envbuild.publish.models import Publication, Revocation, read_publication, unreadable_revocation
from envbuild.publish.tags import PUBLICATION_SUFFIX, REVOKED_SUFFIX, revocation_tags
from envbuild.store.registry import Registry

PUBLICATION_TYPE = "application/vnd.envbuild.publication.v1+json"
# The annotation that has a publication's JSON.
PUBLICATION = "org.envbuild.publication"


class _Entry(Manifest):
    """The manifest under a publication's own tag."""

    annotations: dict[str, str] = Field(default_factory=dict)


def entry_manifest(publication: Publication, manifest_bytes: int) -> RegistryManifest:
    """The record of a publication, for its own tags."""
    subject: dict[str, Json] = {
        "mediaType": MANIFEST_TYPE,
        "digest": publication.oci_digest,
        "size": manifest_bytes,
    }
    # image-spec 1.1: an artifact without content has the empty descriptor as its only layer.
    content = artifact_manifest(
        PUBLICATION_TYPE, EMPTY_DESCRIPTOR, subject, {PUBLICATION: publication.canonical().decode()}
    )
    return RegistryManifest(content=content, media_type=MANIFEST_TYPE)


def revocation_of(registry: Registry, publication: Publication) -> Revocation | None:
    """Why a publication was taken back, by the index or by a tag, whatever the other one has; None where it was not.

    Raises:
        NetworkError: the registry cannot be reached, or refuses.
    """
    if publication.revoked is not None:
        return publication.revoked
    for tag in revocation_tags(publication):
        if digest_of_tag(registry, tag) is None:
            continue
        # Whoever may push can write something else there: that it is there is enough.
        try:
            entry = read_entry(registry, tag)
        except CheckRefusedError:
            entry = None
        return (entry[0].revoked if entry else None) or unreadable_revocation(publication)
    return None


def read_entry(registry: Registry, tag: str) -> tuple[Publication, int] | None:
    """The publication under its own tag, and the size of its image's manifest."""
    document = read_manifest(registry, tag)
    where = f"the tag {tag} of {registry.address}"
    if document is None:
        return None  # listed before it is all there: whoever writes it puts it into the index
    fix = _way_out(registry, tag)
    entry = read(document.content, _Entry, where, lambda name, why, _: not_of_envbuild(name, why, fix))
    publication = read_publication(entry.annotations.get(PUBLICATION, "").encode(), where, fix)
    if entry.subject is None or entry.subject.digest != publication.oci_digest:
        why = "It is not the record of a publication: it refers to another image than it states."
        raise CheckRefusedError(f"{where} is refused", why=why, fix=fix)
    revoking = revocation_tags(publication) if publication.revoked else ()
    if tag not in (publication.tag + PUBLICATION_SUFFIX, *revoking):
        why = f"It has the record of {publication.tag}: somebody wrote it over."
        raise CheckRefusedError(f"{where} is refused", why=why, fix=fix)
    return publication, entry.subject.size_bytes


def _way_out(registry: Registry, tag: str) -> str:
    # Not a removal: that goes by the digest, which whoever wrote this may have given other tags, too.
    image = str(registry.address).replace("oci://", "docker://") + ":" + tag.removesuffix(PUBLICATION_SUFFIX)
    copy = quoted_command("skopeo", "copy", "--all", image, image + REVOKED_SUFFIX)
    return (
        f"Publish that image again, which writes its record anew. If none of you published it, take it back: `{copy}`. "
        "Meanwhile pull by digest."
    )


def read_own_entry(registry: Registry, tag: str) -> tuple[Publication, int] | None:
    """The entry under a tag, for writers: an invalid record, which anyone who may push can write, counts as none."""
    try:
        return read_entry(registry, tag)
    except CheckRefusedError:
        return None
