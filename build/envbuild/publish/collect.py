"""Removes from a repository what nothing needs any more: an image, what refers to it, and its tags.

What stays is whole: only manifests whose subject goes are removed, so no referrer of a kept image. First the index
forgets an image, then its manifests go, the record of its publication last: so a run that was killed is finished by the
next one. Registries free the blobs themselves (docker's by ``registry garbage-collect``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from envbuild.core.errors import CheckRefusedError, NetworkError
from envbuild.oci.push import digest_of_tag
from envbuild.oci.referrers import list_referrers, tag_of
from envbuild.publish.bundle import BUNDLE_TYPE
from envbuild.publish.index import heads_of, leave_out, load_index
from envbuild.publish.models import Publication
from envbuild.publish.records import read_own_entry
from envbuild.publish.tags import DOCKER_SUFFIX, PUBLICATION_SUFFIX
from envbuild.store.registry import Registry
from envbuild.store.tags import list_tags


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Digests of locks and OCI images that keep publications and entries of the store, besides moving tags."""

    locks: frozenset[str] = frozenset()
    images: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The plan of a removal: the publications that go, and why each of the others stays, by its tag.

    Attributes:
        damaged: certified publications that stay and lost what referred to them.
    """

    going: tuple[Publication, ...]
    kept: dict[str, str]
    damaged: tuple[Publication, ...]


def plan_sweep(registry: Registry, needs: Needs) -> Sweep:
    """Plan the removal of unneeded publications. Revoked ones stay: who pulls one must learn why.

    Raises:
        CheckRefusedError: the index is damaged.
        NetworkError: the registry cannot be reached, or refuses.
    """
    index = load_index(registry)
    # What was left out once stays in that list, also where it was published again since.
    left_out = index.left_out - {publication.tag for publication in index.publications}
    published = [*index.publications, *_left_behind(registry, left_out)]
    heads = heads_of(index.publications)
    kept = {publication.tag: why for publication in published if (why := why_kept(publication, heads, needs))}
    images = {publication.oci_digest for publication in published if publication.tag in kept}
    going = []
    for publication in published:
        # A removal goes by the manifest's digest, and would take the image from the tag that stays, too.
        if publication.tag not in kept and publication.oci_digest in images:
            kept[publication.tag] = "its image is one that stays"
        elif publication.tag not in kept:
            going.append(publication)
    staying = [publication for publication in index.publications if publication.tag in kept and publication.certified]
    damaged = tuple(publication for publication in staying if not _has_bundle(registry, publication.oci_digest))
    return Sweep(going=tuple(going), kept=kept, damaged=damaged)


def sweep(registry: Registry, going: Iterable[Publication]) -> None:
    """Remove publications with what refers to them.

    Raises:
        NetworkError: the registry cannot be reached, refuses, or allows no removal.
    """
    publications = tuple(going)
    if publications:
        leave_out(registry, [publication.tag for publication in publications])
    for publication in publications:
        _remove(registry, publication)


def _left_behind(registry: Registry, left_out: Collection[str]) -> list[Publication]:
    """Publications that the index forgot, and whose record is still there."""
    if not left_out:
        return []
    tags = set(list_tags(registry))
    records = [tag + PUBLICATION_SUFFIX for tag in sorted(left_out) if tag + PUBLICATION_SUFFIX in tags]
    entries = [read_own_entry(registry, record) for record in records]
    return [entry[0] for entry in entries if entry is not None]


def why_kept(publication: Publication, heads: Collection[str], needs: Needs) -> str:
    """Why a publication stays, with the tags that moving tags mean; empty where nothing needs it."""
    if publication.revoked is not None:
        return "it was revoked"
    if publication.tag in heads:
        return f"the tag {publication.moving_tag} names it"
    if publication.lock_digest in needs.locks:
        return "a lock needs it"
    return "a late night needs it" if publication.oci_digest in needs.images else ""


def _has_bundle(registry: Registry, digest: str) -> bool:
    try:
        return any(referrer.artifact_type == BUNDLE_TYPE for referrer in list_referrers(registry, digest))
    except CheckRefusedError:
        # A list that cannot be read is as good as none: the image is reported, and nothing is stopped by it.
        return False


def _remove(registry: Registry, publication: Publication) -> None:
    record = digest_of_tag(registry, publication.tag + PUBLICATION_SUFFIX)
    # Asked before the image goes: afterwards the registry may not know them any more. A registry that lists referrers
    # itself has the record among them.
    for artifact in list_referrers(registry, publication.oci_digest):
        if artifact.digest != record:
            _delete(registry, artifact.digest)
    for tag in (tag_of(publication.oci_digest), publication.tag + DOCKER_SUFFIX, publication.tag):
        _delete_tagged(registry, tag)
    _delete(registry, publication.oci_digest)
    _delete_tagged(registry, publication.tag + PUBLICATION_SUFFIX)


def _delete_tagged(registry: Registry, tag: str) -> None:
    # By the digest: registries may allow the removal of manifests and not that of tags (distribution-spec 1.1, "Content
    # Management").
    digest = digest_of_tag(registry, tag)
    if digest is not None:
        _delete(registry, digest)


def _delete(registry: Registry, digest: str) -> None:
    # OCI distribution-spec 1.1, "Deleting Manifests": 400 or 405 where the registry does not allow it.
    answer = registry.ask("DELETE", f"manifests/{digest}", accept=(202, 400, 404, 405))
    if answer.status in (400, 405):
        raise NetworkError(
            f"{registry.error.name} does not allow removal",
            why=f"It answered with status {answer.status}: removal is switched off there.",
            fix="Allow it (docker's registry: storage.delete.enabled), and run the same command again: the index has "
            "forgotten these images, and their manifests are still there.",
        )
