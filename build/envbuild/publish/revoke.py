"""Takes a publication back: the index says so and why, and its moving tag goes back to the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from envbuild.catalog.context import Context
from envbuild.core.errors import ConfigurationError, EnvbuildError, InterruptedByUserError
from envbuild.publish import index
from envbuild.publish.models import Publication, Revocation
from envbuild.publish.moving import move_tag
from envbuild.publish.records import revocation_of
from envbuild.publish.repository import open_repository
from envbuild.publish.sqsh_stores import SqshStore, open_sqsh_store, store_of
from envbuild.store.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """The result of a revocation.

    Attributes:
        publications: those of the digest, as the index has them now.
        heads: what each of their moving tags names now; None where nothing is left.
        nothing_to_do: they were revoked already.
    """

    publications: tuple[Publication, ...]
    heads: Mapping[str, Publication | None]
    nothing_to_do: bool = False


def revoke(to: str, digest: str, reason: str, context: Context, *, sqsh_to: str | None = None) -> Revoked:
    """Revoke what was published under a digest: of the OCI image, of docker's manifest, or of the .sqsh.

    What cannot be done for one tag or store keeps none of the others from it: the first error is raised at the end.

    Args:
        sqsh_to: a .sqsh store that has the image, too, which the index need not know.

    Raises:
        ConfigurationError: nothing there has the digest.
        PublicationRefusedError: it is taken back, and its moving tag is somebody else's now.
        NetworkError: the registry or a store cannot be reached, or refuses.
    """
    registry = open_repository(to, context.site)
    extra = open_sqsh_store(sqsh_to, context.site) if sqsh_to else None
    content, named = _named(registry, digest)
    now = Revocation(reason=reason, at=context.moment())
    # Also those that are revoked: the run that did so may have been killed before the stores and the tags.
    publications = tuple(
        publication if publication.revoked else publication.model_copy(update={"revoked": now}) for publication in named
    )
    failures: list[EnvbuildError] = []
    for publication, revoked in zip(named, publications, strict=True):
        with _collected(failures):
            if revoked is not publication:
                index.record(registry, revoked, content.sizes[publication.oci_digest])
    for revoked in publications:
        with _collected(failures):
            _revoke_in_stores(revoked, extra, context)
    heads: dict[str, Publication | None] = {}
    for tag in dict.fromkeys(publication.moving_tag for publication in named):
        with _collected(failures):
            heads[tag] = head = move_tag(registry, tag)
            if head is not None and head.sqsh is not None and head.sqsh.place:
                store_of(head.sqsh.place, context.site).move_tag(tag, head, context.clock())
    if failures:
        error = failures[0]
        if all(
            revocation_of(registry, publication.model_copy(update={"revoked": None})) for publication in publications
        ):
            error = error.with_context(why=f"The image was taken back, and readers refuse it. {error.why}")
        raise error from failures[0]
    nothing = all(publication.revoked is not None for publication in named)
    return Revoked(publications=publications, heads=heads, nothing_to_do=nothing)


def _named(registry: Registry, digest: str) -> tuple[index.RepositoryIndex, list[Publication]]:
    """The publications with a digest, from the index, else from the publications' own tags."""
    for load in (index.load_index, index.load_all):
        content = load(registry)
        if named := [publication for publication in content.publications if digest in publication.digests]:
            return content, named
    raise ConfigurationError(
        f"nothing with the digest {digest} was published to {registry.address}",
        why=f"It has {len(content.publications)} publications, and none of that digest.",
        fix="Name the digest of an image (OCI or docker) or of a .sqsh, as `envbuild publish` printed it.",
    )


def _revoke_in_stores(publication: Publication, extra: SqshStore | None, context: Context) -> None:
    if publication.revoked is None:
        raise ValueError("the publication is not revoked")
    place = publication.sqsh.place if publication.sqsh else ""
    for store in (store_of(place, context.site) if place else None, extra):
        if store is not None:
            store.revoke(publication.oci_digest, publication.revoked)


@contextmanager
def _collected(failures: list[EnvbuildError]) -> Iterator[None]:
    try:
        yield
    except InterruptedByUserError:
        raise
    except EnvbuildError as error:
        failures.append(error)
