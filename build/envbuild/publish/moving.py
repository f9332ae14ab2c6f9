"""Moves tags: a moving tag names the newest publication of the index that was not revoked, and never anything else."""

from __future__ import annotations

from datetime import datetime

from envbuild.core.errors import PublicationRefusedError
from envbuild.oci.artifact import EMPTY_DESCRIPTOR, artifact_manifest
from envbuild.oci.models import MANIFEST_TYPE
from envbuild.oci.push import CONFLICT, RegistryManifest, digest_of_tag, put_manifest, read_manifest
from envbuild.oci.referrers import MOST_WRITES, not_kept
from envbuild.publish.index import head_of, load_all, read_index, removed
from envbuild.publish.models import Publication
from envbuild.publish.tags import DOCKER_SUFFIX
from envbuild.store.registry import Registry

# What a moving tag names when everything under it was revoked: no image, so that no client runs it.
NOTHING_TYPE = "application/vnd.envbuild.nothing.v1+json"
NOTHING = RegistryManifest(
    content=artifact_manifest(
        NOTHING_TYPE,
        EMPTY_DESCRIPTOR,
        None,
        {"org.opencontainers.image.description": "every image under this tag was revoked"},
    ),
    media_type=MANIFEST_TYPE,
)


def move_tag(registry: Registry, moving_tag: str, at: datetime | None = None) -> Publication | None:
    """Let a moving tag, and docker's next to it, name what the index says at a moment; returns that publication.

    Raises:
        PublicationRefusedError: the tag names an image that is in no index: somebody else's.
        NetworkError: the registry cannot be reached, refuses, or does not keep the tag.
    """
    for _ in range(MOST_WRITES):
        publications = read_index(registry)
        head = head_of(publications, moving_tag, at)
        done = _let_name(registry, moving_tag, head.oci_digest if head else NOTHING.digest, publications)
        # Where the head has no docker manifest, an older one's must not stay under the tag.
        docker = head.docker_digest if head else NOTHING.digest
        if docker is not None or any(
            publication.docker_digest for publication in publications if publication.moving_tag == moving_tag
        ):
            # The call first: `done and ...` would leave docker's tag to the next round.
            done = _let_name(registry, moving_tag + DOCKER_SUFFIX, docker or NOTHING.digest, publications) and done
        if done:
            return head
        # Looked at again from the index on: whoever wrote it meanwhile may have a newer head.
    raise not_kept(registry, moving_tag)


def refuse_foreign(registry: Registry, tag: str, publications: tuple[Publication, ...]) -> None:
    """Refuse a tag that somebody else uses.

    Raises:
        PublicationRefusedError: it names an image that is not in the index, and has no record of its own.
    """
    now = digest_of_tag(registry, tag)
    if now is None or now == NOTHING.digest or _is_of(publications, now):
        return
    # An older index may have been put back, or an empty one.
    if not _is_of(load_all(registry).publications, now):
        raise PublicationRefusedError(
            f"the tag {tag} of {registry.address} is not envbuild's to move",
            why=f"It names {now}, which is not in the index there: somebody else put it there.",
            fix="Give that image another tag and remove this one there, or publish under another tag: --tag NAME.",
            reason="foreign-tag",
        )


def _is_of(publications: tuple[Publication, ...], digest: str) -> bool:
    return any(digest in (publication.oci_digest, publication.docker_digest) for publication in publications)


def _let_name(registry: Registry, tag: str, digest: str, publications: tuple[Publication, ...]) -> bool:
    """Write a tag where it names something else; whether it did not have to be written."""
    if digest_of_tag(registry, tag) == digest:
        return True
    # What is next to a tag of ours is ours.
    if not tag.endswith(DOCKER_SUFFIX):
        refuse_foreign(registry, tag, publications)
    put_manifest(registry, tag, _manifest(registry, digest), accept=(201, *CONFLICT))
    return False


def _manifest(registry: Registry, digest: str) -> RegistryManifest:
    manifest = NOTHING if digest == NOTHING.digest else read_manifest(registry, digest)
    if manifest is None:
        raise removed(registry, digest)
    return manifest
