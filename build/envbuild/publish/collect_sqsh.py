"""Removes from a .sqsh store what nothing needs any more: a publication, its tag, and the files that no other one has.

A publication's document goes last, so that the next call ends what a killed one began.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from envbuild.catalog.fields import moment_of
from envbuild.core.digests import hex_of
from envbuild.core.errors import CheckRefusedError
from envbuild.publish.collect import Needs, Sweep, why_kept
from envbuild.publish.models import Publication
from envbuild.publish.sqsh_stores import CERTIFICATES, FILES, NAMES, SUFFIX, TAGS, SqshStore, document_of

# The publisher of a younger one may not be done.
REST = timedelta(days=1)


def plan_store_sweep(store: SqshStore, needs: Needs, at: datetime) -> Sweep:
    """Plan the removal of unneeded publications from a .sqsh store at a moment.

    Raises:
        CheckRefusedError: a publication is damaged.
        NetworkError: the store cannot be reached, or refuses.
    """
    published, heads = store.publications(), _heads(store)
    kept = {publication.tag: why for publication in published if (why := why_kept(publication, heads, needs))}
    for publication in published:
        if publication.tag not in kept and at - moment_of(publication.published_at) < REST:
            kept[publication.tag] = "it was published within a day"
    damaged = tuple(
        publication
        for publication in published
        if publication.tag in kept and publication.certified and store.bundle(publication) is None
    )
    return Sweep(
        going=tuple(publication for publication in published if publication.tag not in kept), kept=kept, damaged=damaged
    )


def sweep_store(store: SqshStore, going: Iterable[Publication]) -> tuple[Publication, ...]:
    """Remove publications from a .sqsh store; return those that went. One that was published again meanwhile stays.

    Raises:
        CheckRefusedError: a publication is damaged.
        NetworkError: the store cannot be reached, or refuses.
    """
    gone: list[Publication] = []
    for publication in going:
        # Read anew before each removal: a publisher may have put it there again, or another one with the same file.
        published = store.publications()
        if publication not in published:
            continue
        for path in _paths(publication, [other for other in published if other != publication]):
            store.objects.remove(path)
        gone.append(publication)
    return tuple(gone)


def _heads(store: SqshStore) -> set[str]:
    """The immutable tags of the publications that moving tags mean."""
    heads: set[str] = set()
    for path in store.objects.names(TAGS):
        tag = path.removeprefix(f"{TAGS}/").removesuffix(".json")
        try:
            publication = store.find(tag)
        except CheckRefusedError:  # damaged, or what it means is gone: it holds nothing
            continue
        # The folder has the immutable tags, too, which keep nothing.
        if publication is not None and publication.tag != tag:
            heads.add(publication.tag)
    return heads


def _paths(publication: Publication, others: Iterable[Publication]) -> list[str]:
    """The objects of a publication that no other one has, in the order in which they go."""
    rest = tuple(others)
    # The tag first: from then on nobody finds what is no longer whole.
    paths = [f"{TAGS}/{publication.tag}.json"]
    if publication.sqsh is not None and publication.sqsh.digest not in {
        other.sqsh.digest for other in rest if other.sqsh
    }:
        paths += [
            f"{NAMES}/{hex_of(publication.sqsh.digest)}.json",
            f"{FILES}/{hex_of(publication.sqsh.digest)}{SUFFIX}",
        ]
    certificate = publication.certificate_digest
    if certificate is not None and certificate not in {other.certificate_digest for other in rest}:
        paths.append(f"{CERTIFICATES}/{hex_of(certificate)}.json")
    return [*paths, document_of(publication)]
