"""Removes from a repository what nothing needs any more: an image, what refers to it, and its tags.

What stays is whole: only manifests whose subject goes are removed, so no referrer of a kept image; and none that a tag
of something else names. Whoever may push can list anything, and must not have it removed by this account: least of all
that an image was revoked. First the index forgets an image, then its manifests go, the record of its publication last:
so a run that was killed is finished by the next one. Registries free the blobs themselves (docker's by ``registry
garbage-collect``).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from envbuild.core.errors import CheckRefusedError, NetworkError
from envbuild.oci.models import Manifest, not_of_envbuild, read
from envbuild.oci.push import digest_of_tag, read_manifest
from envbuild.oci.referrers import list_referrers, tag_of
from envbuild.publish.bundle import BUNDLE_TYPE
from envbuild.publish.index import heads_of, leave_out, load_index, revoked_by
from envbuild.publish.models import Publication
from envbuild.publish.records import read_own_entry
from envbuild.publish.tags import DOCKER_SUFFIX, INDEX_TAG, PUBLICATION_SUFFIX, REVOKED_SUFFIX
from envbuild.store.registry import Registry
from envbuild.store.tags import list_tags

# For so long it is asked what tags name.
MOST_SECONDS = 1800.0


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
        named: the digests that tags of others name: they stay, whatever refers to what.
    """

    going: tuple[Publication, ...]
    kept: dict[str, str]
    damaged: tuple[Publication, ...]
    named: frozenset[str] = frozenset()


def plan_sweep(registry: Registry, needs: Needs) -> Sweep:
    """Plan the removal of unneeded publications. Revoked ones stay: who pulls one must learn why.

    Raises:
        CheckRefusedError: the index is damaged.
        NetworkError: the registry cannot be reached, or refuses.
    """
    index, tags = load_index(registry), frozenset(list_tags(registry))
    # An index from before a revocation may have been put back.
    listed = [revoked_by(tags, publication) for publication in index.publications]
    # What was left out once stays in that list, also where it was published again since.
    left_out = index.left_out - {publication.tag for publication in listed}
    published = [*listed, *(revoked_by(tags, publication) for publication in _left_behind(registry, left_out, tags))]
    heads = heads_of(listed)
    kept = {publication.tag: why for publication in published if (why := why_kept(publication, heads, needs))}
    images = {publication.oci_digest for publication in published if publication.tag in kept}
    going = []
    for publication in published:
        # A removal goes by the manifest's digest, and would take the image from the tag that stays, too.
        if publication.tag not in kept and publication.oci_digest in images:
            kept[publication.tag] = "its image is one that stays"
        elif publication.tag not in kept:
            going.append(publication)
    named = _named_by_others(registry, tags, going)
    kept |= {publication.tag: "another tag names its image" for publication in going if publication.oci_digest in named}
    staying = [publication for publication in listed if publication.tag in kept and publication.certified]
    damaged = tuple(publication for publication in staying if not _has_bundle(registry, publication.oci_digest))
    return Sweep(
        going=tuple(publication for publication in going if publication.tag not in kept),
        kept=kept,
        damaged=damaged,
        named=named,
    )


def sweep(registry: Registry, plan: Sweep) -> None:
    """Remove publications with what refers to them.

    Raises:
        NetworkError: the registry cannot be reached, refuses, or allows no removal.
    """
    if plan.going:
        leave_out(registry, [publication.tag for publication in plan.going])
    for publication in plan.going:
        _remove(registry, publication, plan.named)


def _named_by_others(registry: Registry, tags: Collection[str], going: Iterable[Publication]) -> frozenset[str]:
    """The digests that tags name which do not go."""
    own = {tag for publication in going for tag in (*_own_tags(publication), publication.tag + PUBLICATION_SUFFIX)}
    if not own:
        return frozenset()
    # A publication of such a name is nobody's.
    staying = [tag for tag in tags if tag not in own or tag.endswith(REVOKED_SUFFIX) or tag == INDEX_TAG]
    started, named = time.monotonic(), set[str]()
    for tag in sorted(staying):
        if time.monotonic() - started > MOST_SECONDS:
            raise NetworkError(
                f"{registry.error.name} has too many tags",
                why=f"In {MOST_SECONDS:.0f} s it said what {len(named)} of {len(staying)} name, which must stay.",
                fix="Look who writes tags there, and remove those that nobody needs.",
            )
        if (digest := digest_of_tag(registry, tag)) is not None:
            named.add(digest)
    return frozenset(named)


def _own_tags(publication: Publication) -> tuple[str, ...]:
    """The tags of an image alone, but for its record's."""
    return tag_of(publication.oci_digest), publication.tag + DOCKER_SUFFIX, publication.tag


def _left_behind(registry: Registry, left_out: Collection[str], tags: Collection[str]) -> list[Publication]:
    """Publications that the index forgot, and whose record is still there."""
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


def _remove(registry: Registry, publication: Publication, named: Collection[str]) -> None:
    tag = publication.tag + PUBLICATION_SUFFIX
    record = digest_of_tag(registry, tag)
    # Asked before the image goes: afterwards the registry may not know them any more. A registry that lists referrers
    # itself has the record among them.
    artifacts = [artifact.digest for artifact in list_referrers(registry, publication.oci_digest)]
    attached = [
        digest for digest in artifacts if digest != record and _refers_to(registry, digest, publication.oci_digest)
    ]
    # By the digest: registries may allow the removal of manifests and not that of tags (distribution-spec 1.1, "Content
    # Management").
    tagged = (digest_of_tag(registry, name) for name in _own_tags(publication))
    for digest in (*attached, *tagged, publication.oci_digest, digest_of_tag(registry, tag)):
        if digest is not None and digest not in named:
            _delete(registry, digest)


def _refers_to(registry: Registry, digest: str, image: str) -> bool:
    """Whether a manifest that is listed as attached to an image is: the list under a tag can name any."""
    raw = read_manifest(registry, digest)
    if raw is None:
        return False
    try:
        manifest = read(raw.content, Manifest, f"an artifact of {registry.address}", not_of_envbuild)
    except CheckRefusedError:
        return False
    return manifest.subject is not None and manifest.subject.digest == image


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
