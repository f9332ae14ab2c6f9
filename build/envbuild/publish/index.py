"""The index of a repository: which publications it holds, in one document that one request gets.

It is an OCI image index at the tag ``envbuild-index``; each entry is an image's manifest, with its publication as an
annotation. Registries have no conditional put of a tag, so a publication is first written under a tag of its own
(``<tag>-publication``, ``<tag>-revoked``), and whoever writes the index looks at these tags before and after: a writer
whose index replaced another's sees that other's tag, and puts its entry back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from pydantic import Field

from envbuild.catalog.context import utc_now
from envbuild.certify.certificate.statement import is_after
from envbuild.core.digests import Json, canonical_json
from envbuild.core.errors import CheckRefusedError, NetworkError, PublicationRefusedError
from envbuild.oci.artifact import EMPTY_DESCRIPTOR, artifact_manifest
from envbuild.oci.models import MANIFEST_TYPE, Index, Manifest, not_of_envbuild, read
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
from envbuild.publish.models import Publication, Revocation, read_publication, unreadable_revocation
from envbuild.publish.tags import INDEX_TAG, PUBLICATION_SUFFIX, REVOKED_SUFFIX, TAG_TAKEN, revocation_tags
from envbuild.store.limits import MOST_SECONDS
from envbuild.store.registry import Registry
from envbuild.store.tags import list_tags, list_tags_if_allowed

ARTIFACT_TYPE = "application/vnd.envbuild.index.v1+json"
PUBLICATION_TYPE = "application/vnd.envbuild.publication.v1+json"
PUBLICATION = "org.envbuild.publication"
# The tags of publications that were left out to keep the index small.
LEFT_OUT = "org.envbuild.left-out"
_MADE_ANEW = (
    f"Use the version of envbuild that wrote it, or remove the tag {INDEX_TAG} there: the next publication writes it "
    "anew from the publications' own tags."
)
_REMOVE = "Publish the image of that tag again, which writes its record anew; if there is none, remove the tag there."
# Registries take manifests of 4 MiB (distribution-spec 1.1, "Pushing Manifests").
MOST_BYTES = 3 << 20


class _Entry(Manifest):
    """The manifest under a publication's own tag."""

    annotations: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RepositoryIndex:
    """What an index states.

    Attributes:
        before: its document; None where there is none yet.
        sizes: of the images' manifests in bytes, by their digest.
    """

    publications: tuple[Publication, ...] = ()
    left_out: frozenset[str] = frozenset()
    sizes: Mapping[str, int]
    before: RegistryManifest | None = None


def read_index(registry: Registry) -> tuple[Publication, ...]:
    """What a repository holds, the newest last; nothing where nothing was published there. One request.

    Raises:
        CheckRefusedError: an entry is damaged, or of another version of envbuild.
        NetworkError: the registry cannot be reached, or refuses.
    """
    return load_index(registry).publications


def load_index(registry: Registry) -> RepositoryIndex:
    """The same with what its writers need."""
    found = read_manifest(registry, INDEX_TAG)
    if found is None:
        return _from_own_tags(registry)
    where = f"the index of {registry.address}"
    index = read(found.content, Index, where, lambda name, why, _: not_of_envbuild(name, why, _MADE_ANEW))
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
        left_out=frozenset(index.annotations.get(LEFT_OUT, "").split()),
        sizes={entry.digest: entry.size_bytes for entry in index.manifests},
        before=found,
    )


def _from_own_tags(registry: Registry) -> RepositoryIndex:
    """What an index that is not there would state: nothing was published, or a retention rule took it."""
    tags = [tag for tag in list_tags(registry) if tag.endswith((PUBLICATION_SUFFIX, REVOKED_SUFFIX))]
    entries = [*_own_entries(registry, tags)]
    sizes = {publication.oci_digest: size for publication, size in entries}
    return RepositoryIndex(publications=_merged((), [publication for publication, _ in entries]), sizes=sizes)


def read_all(registry: Registry) -> tuple[Publication, ...]:
    """The publications of :func:`load_all`, for those who must not miss one.

    Raises:
        CheckRefusedError: what is there is damaged, or a tag was written over.
        NetworkError: the registry cannot be reached, or refuses.
    """
    index = load_index(registry)
    missing = _read_entries(registry, _tags_without_entry(registry, index), read_entry)
    return _merged(index.publications, [publication for publication, _ in missing])


def load_all(registry: Registry) -> RepositoryIndex:
    """The same as :func:`load_index`, with what has a tag of its own and is not in the index.

    Whoever may push can put an older index back, and cannot take tags away. Where this account may not list them, the
    index counts alone. What is no record of its tag is left out: it keeps nobody from publishing or revoking.

    Raises:
        CheckRefusedError: the index is damaged.
        NetworkError: the registry cannot be reached, or refuses.
    """
    index = load_index(registry)
    entries = [*_own_entries(registry, _tags_without_entry(registry, index))]
    sizes = {**index.sizes, **{publication.oci_digest: size for publication, size in entries}}
    publications = _merged(index.publications, [publication for publication, _ in entries])
    return replace(index, publications=publications, sizes=sizes)


def _tags_without_entry(registry: Registry, index: RepositoryIndex) -> list[str]:
    listed = {item.tag + PUBLICATION_SUFFIX for item in index.publications}
    tags = list_tags_if_allowed(registry) or []
    return [tag for tag in tags if tag.endswith(PUBLICATION_SUFFIX) and tag not in listed]


def _own_entries(registry: Registry, tags: Iterable[str]) -> Iterator[tuple[Publication, int]]:
    return _read_entries(registry, tags, read_own_entry)


def _read_entries(
    registry: Registry, tags: Iterable[str], read_one: Callable[[Registry, str], tuple[Publication, int] | None]
) -> Iterator[tuple[Publication, int]]:
    """Publications under tags, of which anybody who may push can write many."""
    started = time.monotonic()
    for count, tag in enumerate(tags):
        if time.monotonic() - started > MOST_SECONDS:
            raise NetworkError(
                f"{registry.error.name} has too many publications that its index lacks",
                why=f"{count} were read in {MOST_SECONDS:.0f} s, and there are more.",
                fix=f"Look who writes tags that end in {PUBLICATION_SUFFIX} there, and remove those that nobody needs.",
            )
        if (found := read_one(registry, tag)) is not None:
            yield found


def head_of(publications: Iterable[Publication], moving_tag: str, at: datetime | None = None) -> Publication | None:
    """The publication that a moving tag belongs to: the newest that was not revoked; None when there is none.

    Args:
        at: now. What was published after it has a wrong clock or a wrong author, and counts where nothing else does.
    """
    now = at or utc_now()
    fitting = [item for item in publications if item.moving_tag == moving_tag and item.revoked is None]
    counted = [item for item in fitting if not is_after(item.published_at, now)] or fitting
    return max(counted, key=lambda item: (item.published_at, item.tag), default=None)


def record(registry: Registry, publication: Publication, manifest_bytes: int) -> tuple[Publication, ...]:
    """Write a publication, new or revoked, and see to it that the index has it; returns what the index holds then.

    Args:
        manifest_bytes: the size of the image's manifest, which must be there.

    Raises:
        CheckRefusedError: what is there is damaged.
        PublicationRefusedError: another publisher took the immutable tag meanwhile.
        NetworkError: the registry cannot be reached, refuses, or does not keep what is written.
    """
    _refuse_taken_unless_revoked(registry, publication)
    # The last one decides what a writer of the index puts back: it is written last.
    own_tags = reversed(revocation_tags(publication)) if publication.revoked else [publication.tag + PUBLICATION_SUFFIX]
    for tag in own_tags:
        put_manifest(registry, tag, _entry_manifest(publication, manifest_bytes))
    # Put into the list once. Where it is missing in the next round, _write() found that the registry lost the image.
    own = {publication.tag: publication}
    for _ in range(MOST_WRITES):
        index = load_index(registry)
        listed = next((item for item in index.publications if item.tag == publication.tag), None)
        if listed is not None and not is_same(listed, publication):
            # Its record was replaced by this one between two requests.
            put_manifest(
                registry, listed.tag + PUBLICATION_SUFFIX, _entry_manifest(listed, index.sizes[listed.oci_digest])
            )
            raise _taken_by(registry, listed)
        sizes = {**index.sizes, publication.oci_digest: manifest_bytes}
        merged, own = _merged(index.publications, own.values()), {}
        for found, size in _own_entries(registry, _unknown_tags(list_tags(registry), merged, index.left_out)):
            # By the tag of a digest also what was left out would come back.
            if found.tag not in index.left_out:
                merged = _merged(merged, [found])
                sizes[found.oci_digest] = size
        # Without an index the same list came from the publications' own tags, and has to be written.
        if merged == index.publications and index.before is not None:
            if publication.tag in {item.tag for item in merged}:
                # Again: another's record may have come after the first look, and a registry refuses neither.
                _refuse_taken_unless_revoked(registry, publication)
                return merged
            raise removed(registry, publication.oci_digest)
        if not _write(registry, merged, sizes, index):
            own = {publication.tag: publication}
    raise not_kept(registry, INDEX_TAG)


def is_same(one: Publication, other: Publication) -> bool:
    """Whether an immutable tag of one is that of the other: of one image under one moving tag."""
    return (one.oci_digest, one.moving_tag) == (other.oci_digest, other.moving_tag)


def refuse_taken(registry: Registry, publication: Publication) -> None:
    """Refuse an immutable tag that has the record of another publication.

    Raises:
        PublicationRefusedError: it has.
    """
    found = read_own_entry(registry, publication.tag + PUBLICATION_SUFFIX)
    if found is not None and not is_same(found[0], publication):
        raise _taken_by(registry, found[0])


def _refuse_taken_unless_revoked(registry: Registry, publication: Publication) -> None:
    # Whoever may push may write another record there, and must not keep the image from being taken back.
    if publication.revoked is None:
        refuse_taken(registry, publication)


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
        kept = tuple(item for item in publications if item.tag not in gone)
        manifest = RegistryManifest(content=_rendered(kept, sizes, index.left_out | gone), media_type=INDEX_TYPE)
        headers = if_unchanged(index.before)
        # Refused again after it was looked at, it is refused for good.
        accepted = (201, *CONFLICT) if looked else (201, *CONFLICT, *NOT_THERE)
        answer = put_manifest(registry, INDEX_TAG, manifest, accept=accepted, headers=headers)
        if answer.status not in NOT_THERE:
            return answer.status not in CONFLICT
        # Registries refuse an index of what they do not have: a retention rule took it. What is gone is listed no more.
        gone = frozenset(item.tag for item in publications if digest_of_tag(registry, item.oci_digest) is None)
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
        kept = tuple(item for item in index.publications if item.tag not in tags)
        if kept == index.publications and index.left_out >= {*tags}:
            return kept
        # Whether it was taken is seen by what the next round reads.
        _write(registry, kept, index.sizes, replace(index, left_out=index.left_out | {*tags}))
    raise not_kept(registry, INDEX_TAG)


def _merged(known: Iterable[Publication], more: Iterable[Publication]) -> tuple[Publication, ...]:
    """By their tags, the newest last; a publication that was revoked stays so."""
    by_tag = {item.tag: item for item in known}
    for item in more:
        if (other := by_tag.get(item.tag)) is None or other.revoked is None:
            by_tag[item.tag] = item
    return tuple(sorted(by_tag.values(), key=lambda item: (item.published_at, item.tag)))


def _unknown_tags(tags: Iterable[str], known: Iterable[Publication], left_out: frozenset[str]) -> list[str]:
    """The tags of publications and revocations that the index lacks."""
    known = [*known]
    # What was left out counts as revoked: neither of its tags brings it back.
    seen = {f"{tag}{suffix}" for tag in left_out for suffix in (PUBLICATION_SUFFIX, REVOKED_SUFFIX)}
    seen |= {item.tag + PUBLICATION_SUFFIX for item in known}
    seen |= {tag for item in known if item.revoked is not None for tag in revocation_tags(item)}
    return [tag for tag in tags if tag.endswith((PUBLICATION_SUFFIX, REVOKED_SUFFIX)) and tag not in seen]


def _entry_manifest(publication: Publication, manifest_bytes: int) -> RegistryManifest:
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
    found = read_manifest(registry, tag)
    where = f"the tag {tag} of {registry.address}"
    if found is None:
        return None  # listed before it is all there: whoever writes it puts it into the index
    entry = read(found.content, _Entry, where, not_of_envbuild)
    publication = read_publication(entry.annotations.get(PUBLICATION, "").encode(), where)
    if entry.subject is None or entry.subject.digest != publication.oci_digest:
        why = "It is not the record of a publication: it refers to another image than it states."
        raise CheckRefusedError(f"{where} is refused", why=why, fix=_REMOVE)
    revoking = revocation_tags(publication) if publication.revoked else ()
    if tag not in (publication.tag + PUBLICATION_SUFFIX, *revoking):
        why = f"It has the record of {publication.tag}: somebody wrote it over."
        raise CheckRefusedError(f"{where} is refused", why=why, fix=_REMOVE)
    return publication, entry.subject.size_bytes


def read_own_entry(registry: Registry, tag: str) -> tuple[Publication, int] | None:
    """The same for writers: what is no record, which anybody who may push can put there, is as good as none."""
    try:
        return read_entry(registry, tag)
    except CheckRefusedError:
        return None


def _rendered(publications: tuple[Publication, ...], sizes: Mapping[str, int], left_out: frozenset[str]) -> bytes:
    """The document: where it would be too large, the oldest that no moving tag needs are left out."""
    heads = {head.tag for item in publications if (head := head_of(publications, item.moving_tag))}
    kept, gone = list(publications), set(left_out)
    while True:
        content = canonical_json(
            {
                "schemaVersion": 2,
                "mediaType": INDEX_TYPE,
                "artifactType": ARTIFACT_TYPE,
                "manifests": [_described(item, sizes[item.oci_digest]) for item in kept],
                "annotations": {LEFT_OUT: " ".join(sorted(gone))} if gone else {},
            }
        )
        oldest = next((item for item in kept if item.tag not in heads), None)
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
