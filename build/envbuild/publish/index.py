"""The index of a repository: which publications it holds, in one document that one request gets.

It is an OCI image index at the tag ``envbuild-index``; each entry is an image's manifest, with its publication as an
annotation. Registries have no conditional put of a tag, so a publication is first written under a tag of its own
(``<tag>-publication``, ``<tag>-revoked``), and whoever writes the index looks at these tags before and after: a writer
whose index replaced another's sees that other's tag, and puts its entry back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from envbuild.catalog.context import utc_now
from envbuild.certify.certificate.statement import is_after
from envbuild.core.digests import Json, canonical_json
from envbuild.core.errors import CheckRefusedError, NetworkError, PublicationRefusedError
from envbuild.oci.models import MANIFEST_TYPE, Index, not_of_envbuild, read
from envbuild.oci.push import (
    CONFLICT,
    NOT_THERE,
    RegistryManifest,
    digest_of_tag,
    if_unchanged,
    put_manifest,
    read_manifest,
)
from envbuild.oci.referrers import INDEX_TYPE, MOST_WRITES, not_kept
from envbuild.publish.models import TAG_PATTERN, Publication, read_publication, unreadable_revocation
from envbuild.publish.records import PUBLICATION, entry_manifest, read_entry, read_own_entry
from envbuild.publish.tags import (
    INDEX_TAG,
    PUBLICATION_SUFFIX,
    REVOKED_SUFFIX,
    TAG_TAKEN,
    is_immutable,
    revocation_tags,
)
from envbuild.store.registry import Registry
from envbuild.store.tags import MOST_SECONDS, list_tags, list_tags_if_allowed

ARTIFACT_TYPE = "application/vnd.envbuild.index.v1+json"
# The tags of publications that were left out to keep the index small.
LEFT_OUT = "org.envbuild.left-out"
_MADE_ANEW = (
    "Use the version of envbuild that wrote it. The next publication by an account that may list tags writes it anew "
    "from the publications' own tags."
)
# Registries take manifests of 4 MiB (distribution-spec 1.1, "Pushing Manifests").
MOST_BYTES = 3 << 20


@dataclass(frozen=True, kw_only=True)
class RepositoryIndex:
    """The content of an index.

    Attributes:
        unlisted: the tags of publications that the index lacks.
        before: its document; None where there is none yet.
        is_lost: it is not there, or cannot be read: what it would state comes from the publications' own tags.
        sizes: of the images' manifests in bytes, by their digest.
    """

    publications: tuple[Publication, ...] = ()
    left_out: frozenset[str] = frozenset()
    sizes: Mapping[str, int]
    unlisted: frozenset[str] = frozenset()
    before: RegistryManifest | None = None
    is_lost: bool = False


def read_index(registry: Registry) -> tuple[Publication, ...]:
    """The publications of a repository, the newest last. One request.

    Raises:
        CheckRefusedError: an entry is damaged, and this account may not list tags.
        NetworkError: the registry cannot be reached, or refuses.
    """
    return load_index(registry).publications


def load_index(registry: Registry) -> RepositoryIndex:
    """The index of a repository, with the facts that its writers need."""
    document = read_manifest(registry, INDEX_TAG)
    if document is None:
        return _from_own_tags(registry, list_tags(registry), None)
    try:
        return _parsed(registry, document)
    except CheckRefusedError:
        tags = list_tags_if_allowed(registry)
        if tags is None:
            raise
        # Whoever may push can write anything there, and must keep nobody from publishing or revoking.
        return _from_own_tags(registry, tags, document)


def _parsed(registry: Registry, document: RegistryManifest) -> RepositoryIndex:
    where = f"the index of {registry.address}"
    index = read(document.content, Index, where, lambda name, why, _: not_of_envbuild(name, why, _MADE_ANEW))
    publications = []
    for entry in index.manifests:
        publication = read_publication(entry.annotations.get(PUBLICATION, "").encode(), where, fix=_MADE_ANEW)
        if publication.oci_digest != entry.digest:
            raise CheckRefusedError(
                f"{where} is refused",
                why=f"Its entry of {entry.digest} has the publication of {publication.oci_digest}: it was changed.",
                fix=_MADE_ANEW,
            )
        publications.append(publication)
    return RepositoryIndex(
        # Of two entries of one tag the one that was taken back.
        publications=_merged((), publications),
        # What is no tag cannot be written back.
        left_out=frozenset(tag for tag in index.annotations.get(LEFT_OUT, "").split() if re.match(TAG_PATTERN, tag)),
        sizes={entry.digest: entry.size_bytes for entry in index.manifests},
        before=document,
    )


def _from_own_tags(registry: Registry, tags: Collection[str], before: RegistryManifest | None) -> RepositoryIndex:
    """The content of a missing or unreadable index, from the publications' own tags."""
    entries = [*_read_entries(registry, [tag for tag in tags if tag.endswith((PUBLICATION_SUFFIX, REVOKED_SUFFIX))])]
    merged = _merged((), [publication for publication, _ in entries])
    return RepositoryIndex(
        # What is in the place of a revocation revokes, whatever it is: as for readers.
        publications=tuple(revoked_by(tags, publication) for publication in merged),
        sizes={publication.oci_digest: size for publication, size in entries},
        before=before,
        is_lost=True,
    )


def revoked_by(tags: Collection[str], publication: Publication) -> Publication:
    """The publication as the tags of its repository have it: taken back where one says so."""
    if publication.revoked is not None or not any(tag in tags for tag in revocation_tags(publication)):
        return publication
    return publication.model_copy(update={"revoked": unreadable_revocation(publication)})


def read_all(registry: Registry) -> tuple[Publication, ...]:
    """The publications of :func:`load_all`, for those who must not miss one.

    Raises:
        CheckRefusedError: what is there is damaged, or a tag was written over.
        NetworkError: the registry cannot be reached, or refuses.
    """
    index, tags, unlisted = _with_unlisted_tags(registry)

    def read_one(registry: Registry, tag: str) -> tuple[Publication, int] | None:
        # Of what was taken back nothing can hide a newer one.
        revoked = tag.removesuffix(PUBLICATION_SUFFIX) + REVOKED_SUFFIX in tags
        return read_own_entry(registry, tag) if revoked else read_entry(registry, tag)

    missing = _read_entries(registry, unlisted, read_one)
    return _merged(index.publications, [publication for publication, _ in missing])


def load_all(registry: Registry) -> RepositoryIndex:
    """The index, with the publications that have tags of their own and are missing in it.

    Whoever may push can put an older index back, and cannot take tags away. Where this account may not list them, the
    index counts alone. What is no record of its tag is left out: it keeps nobody from publishing or revoking.

    Raises:
        CheckRefusedError: the index is damaged.
        NetworkError: the registry cannot be reached, or refuses.
    """
    index, tags, missing = _with_unlisted_tags(registry)
    entries = [*_read_entries(registry, missing)]
    sizes = {**index.sizes, **{publication.oci_digest: size for publication, size in entries}}
    publications = _merged(index.publications, [revoked_by(tags, publication) for publication, _ in entries])
    unlisted = frozenset(publication.tag for publication, _ in entries)
    return replace(index, publications=publications, sizes=sizes, unlisted=unlisted)


def _with_unlisted_tags(registry: Registry) -> tuple[RepositoryIndex, frozenset[str], list[str]]:
    """The index, all tags of the repository, and the tags of records that the index lacks, of images that are there."""
    index, tags = load_index(registry), frozenset(list_tags_if_allowed(registry) or [])
    images = filter(is_immutable, tags - {publication.tag for publication in index.publications})
    return index, tags, sorted(tag + PUBLICATION_SUFFIX for tag in images if tag + PUBLICATION_SUFFIX in tags)


def _read_entries(
    registry: Registry,
    tags: Iterable[str],
    read_one: Callable[[Registry, str], tuple[Publication, int] | None] = read_own_entry,
) -> Iterator[tuple[Publication, int]]:
    """Publications under tags, of which anybody who may push can write many."""
    started = time.monotonic()
    for count, tag in enumerate(tags):
        if time.monotonic() - started > MOST_SECONDS:
            raise NetworkError(
                f"{registry.error.name} has too many publications that its index lacks",
                why=f"{count} were read in {MOST_SECONDS:.0f} s, and there are more.",
                fix=f"Find out who writes tags that end in {PUBLICATION_SUFFIX}, and remove those that nobody needs.",
            )
        if (entry := read_one(registry, tag)) is not None:
            yield entry


def head_of(publications: Iterable[Publication], moving_tag: str, at: datetime | None = None) -> Publication | None:
    """The publication that a moving tag belongs to: the newest that was not revoked; None when there is none.

    Args:
        at: now. What was published after it has a wrong clock or a wrong author, and counts where nothing else does.
    """
    now = at or utc_now()
    fitting = [
        publication
        for publication in publications
        if publication.moving_tag == moving_tag and publication.revoked is None
    ]
    counted = [publication for publication in fitting if not is_after(publication.published_at, now)] or fitting
    return max(counted, key=lambda publication: (publication.published_at, publication.tag), default=None)


def heads_of(publications: Collection[Publication]) -> set[str]:
    """The immutable tags of the publications that moving tags belong to."""
    moving_tags = {publication.moving_tag for publication in publications}
    return {head.tag for tag in moving_tags if (head := head_of(publications, tag))}


def record(registry: Registry, publication: Publication, manifest_bytes: int) -> tuple[Publication, ...]:
    """Write a publication, new or revoked, and see to it that the index has it; returns what the index holds then.

    Args:
        manifest_bytes: the size of the image's manifest, which must be there.

    Raises:
        CheckRefusedError: what is there is damaged.
        PublicationRefusedError: another publisher took the immutable tag meanwhile.
        NetworkError: the registry cannot be reached, refuses, or does not keep what is written.
    """
    _refuse_taken(registry, publication)
    # The last one decides what a writer of the index puts back: it is written last.
    own_tags = reversed(revocation_tags(publication)) if publication.revoked else [publication.tag + PUBLICATION_SUFFIX]
    for tag in own_tags:
        put_manifest(registry, tag, entry_manifest(publication, manifest_bytes))
    # Put into the list once. Where it is missing in the next round, _write() found that the registry lost the image.
    own = {publication.tag: publication}
    for _ in range(MOST_WRITES):
        index = load_index(registry)
        listed = next((other for other in index.publications if other.tag == publication.tag), None)
        if listed is not None and not is_same(listed, publication):
            # Its record was replaced by this one between two requests.
            put_manifest(
                registry, listed.tag + PUBLICATION_SUFFIX, entry_manifest(listed, index.sizes[listed.oci_digest])
            )
            raise _taken_by(registry, listed)
        sizes = {**index.sizes, publication.oci_digest: manifest_bytes}
        merged, own = _merged(index.publications, own.values()), {}
        for entry, size in _read_entries(registry, _unknown_tags(list_tags(registry), merged, index.left_out)):
            # By the tag of a digest also what was left out would come back.
            if entry.tag not in index.left_out:
                merged = _merged(merged, [entry])
                sizes[entry.oci_digest] = size
        # Without an index the same list came from the publications' own tags, and has to be written.
        if merged == index.publications and not index.is_lost:
            if publication.tag in {other.tag for other in merged}:
                # Again: another's record may have come after the first look, and a registry refuses neither.
                _refuse_taken(registry, publication)
                return merged
            raise removed(registry, publication.oci_digest)
        if not _write(registry, merged, sizes, index):
            own = {publication.tag: publication}
    raise not_kept(registry, INDEX_TAG)


def is_same(one: Publication, other: Publication) -> bool:
    """Whether an immutable tag of one is that of the other: of one image under one moving tag."""
    return (one.oci_digest, one.moving_tag) == (other.oci_digest, other.moving_tag)


def _refuse_taken(registry: Registry, publication: Publication) -> None:
    """Refuse an immutable tag that has the record of another publication, unless the publication is revoked.

    Raises:
        PublicationRefusedError: it has.
    """
    # Whoever may push may write another record there, and must not keep the image from being taken back.
    entry = read_own_entry(registry, publication.tag + PUBLICATION_SUFFIX) if publication.revoked is None else None
    if entry is not None and not is_same(entry[0], publication):
        raise _taken_by(registry, entry[0])


def taken(registry: Registry, tag: str, why: str) -> PublicationRefusedError:
    """The error for an immutable tag that another publisher had first."""
    return PublicationRefusedError(
        f"the tag {tag} of {registry.address} was taken meanwhile",
        why=why,
        fix="Run the same command again: it takes the next free tag.",
        reason=TAG_TAKEN,
    )


def _taken_by(registry: Registry, other: Publication) -> PublicationRefusedError:
    return taken(registry, other.tag, f"Another publisher has it for {other.oci_digest} under {other.moving_tag}.")


def _write(
    registry: Registry, publications: tuple[Publication, ...], sizes: Mapping[str, int], index: RepositoryIndex
) -> bool:
    """Put the index there; False where it was changed meanwhile, as far as the registry looks at that."""
    gone, looked = frozenset[str](), False
    while True:
        kept = tuple(publication for publication in publications if publication.tag not in gone)
        manifest = RegistryManifest(content=_rendered(kept, sizes, index.left_out | gone), media_type=INDEX_TYPE)
        headers = if_unchanged(index.before)
        # Refused again after it was looked at, it is refused for good.
        accepted = (201, *CONFLICT) if looked else (201, *CONFLICT, *NOT_THERE)
        answer = put_manifest(registry, INDEX_TAG, manifest, accept=accepted, headers=headers)
        if answer.status not in NOT_THERE:
            return answer.status not in CONFLICT
        # Registries refuse an index of what they do not have: a retention rule took it. What is gone is listed no more.
        gone = frozenset(
            publication.tag for publication in publications if digest_of_tag(registry, publication.oci_digest) is None
        )
        looked = True


def removed(registry: Registry, digest: str) -> NetworkError:
    """The error for a manifest that was there."""
    return NetworkError(
        f"{registry.error.name} does not have {digest} any more",
        why="It was published there. A retention rule, or somebody, removed it.",
        fix="Publish that image again, and spare tagged images and what refers to them in the retention rules.",
    )


def leave_out(registry: Registry, tags: Collection[str]) -> tuple[Publication, ...]:
    """Take publications out of the index, for good; returns what the index holds then. Their manifests stay.

    Raises:
        NetworkError: the registry cannot be reached, refuses, or does not keep what is written.
    """
    for _ in range(MOST_WRITES):
        index = load_index(registry)
        kept = tuple(publication for publication in index.publications if publication.tag not in tags)
        if kept == index.publications and index.left_out >= {*tags}:
            return kept
        # Whether it was taken is seen by what the next round reads.
        _write(registry, kept, index.sizes, replace(index, left_out=index.left_out | {*tags}))
    raise not_kept(registry, INDEX_TAG)


def _merged(known: Iterable[Publication], more: Iterable[Publication]) -> tuple[Publication, ...]:
    """By their tags, the newest last; a publication that was revoked stays so."""
    by_tag = {publication.tag: publication for publication in known}
    for publication in more:
        if (other := by_tag.get(publication.tag)) is None or other.revoked is None:
            by_tag[publication.tag] = publication
    return tuple(sorted(by_tag.values(), key=lambda publication: (publication.published_at, publication.tag)))


def _unknown_tags(tags: Iterable[str], known: Iterable[Publication], left_out: frozenset[str]) -> list[str]:
    """The tags of publications and revocations that the index lacks."""
    known = [*known]
    # What was left out counts as revoked: neither of its tags brings it back.
    seen = {f"{tag}{suffix}" for tag in left_out for suffix in (PUBLICATION_SUFFIX, REVOKED_SUFFIX)}
    seen |= {publication.tag + PUBLICATION_SUFFIX for publication in known}
    seen |= {tag for publication in known if publication.revoked is not None for tag in revocation_tags(publication)}
    return [tag for tag in tags if tag.endswith((PUBLICATION_SUFFIX, REVOKED_SUFFIX)) and tag not in seen]


def _rendered(publications: tuple[Publication, ...], sizes: Mapping[str, int], left_out: frozenset[str]) -> bytes:
    """The document: where it would be too large, the oldest that no moving tag needs are left out."""
    heads = heads_of(publications)
    kept, gone = list(publications), set(left_out)
    while True:
        content = canonical_json(
            {
                "schemaVersion": 2,
                "mediaType": INDEX_TYPE,
                "artifactType": ARTIFACT_TYPE,
                "manifests": [_described(publication, sizes[publication.oci_digest]) for publication in kept],
                "annotations": {LEFT_OUT: " ".join(sorted(gone))} if gone else {},
            }
        )
        oldest = next((publication for publication in kept if publication.tag not in heads), None)
        if len(content) <= MOST_BYTES or oldest is None:
            return content
        kept.remove(oldest)
        gone.add(oldest.tag)


def _described(publication: Publication, manifest_bytes: int) -> Json:
    state = "revoked" if publication.revoked else "certified" if publication.certified else "uncertified"
    annotations: dict[str, Json] = {
        "org.opencontainers.image.ref.name": publication.tag,
        "org.envbuild.stack": publication.stack,
        "org.envbuild.target": publication.target,
        "org.envbuild.gpus": ",".join(publication.gpus),
        "org.envbuild.lock": publication.lock_digest,
        "org.envbuild.moving-tag": publication.moving_tag,
        "org.envbuild.state": state,
        PUBLICATION: publication.canonical().decode(),
    }
    if publication.sqsh is not None:
        annotations["org.envbuild.sqsh"] = publication.sqsh.digest
    return {
        "mediaType": MANIFEST_TYPE,
        "digest": publication.oci_digest,
        "size": manifest_bytes,
        "annotations": annotations,
    }
