"""Takes a publication back: the index says so and why, and its moving tag goes back to the one before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envbuild.catalog.context import Context
from envbuild.core.errors import ConfigurationError, PublicationRefusedError
from envbuild.publish import index
from envbuild.publish.models import Publication, Revocation
from envbuild.publish.moving import move_tag
from envbuild.publish.repository import open_repository
from envbuild.publish.sqsh_stores import store_of


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """What was taken back.

    Attributes:
        publications: those of the digest, as the index has them now.
        heads: what each of their moving tags names now; None where nothing is left.
        nothing_to_do: they were revoked already.
    """

    publications: tuple[Publication, ...]
    heads: Mapping[str, Publication | None]
    nothing_to_do: bool = False


def revoke(to: str, digest: str, reason: str, context: Context) -> Revoked:
    """Revoke what was published under a digest: of the OCI image, of docker's manifest, or of the .sqsh.

    Raises:
        ConfigurationError: nothing there has the digest.
        PublicationRefusedError: it is taken back, and its moving tag is somebody else's now.
        NetworkError: the registry cannot be reached, or refuses.
    """
    registry = open_repository(to, context.site)
    found = index.load_index(registry)
    named = [item for item in found.publications if digest in item.digests]
    if not named:
        raise ConfigurationError(
            f"nothing with the digest {digest} was published to {registry.address}",
            why=f"Its index has {len(found.publications)} publications, and none of that digest.",
            fix="Name the digest of an image (OCI or docker) or of a .sqsh, as `envbuild publish` printed it.",
        )
    now = Revocation(reason=reason, at=context.moment())
    publications = []
    for item in named:
        # Also those that are revoked: the run that did so may have been killed before the store and the tags.
        revoked = item if item.revoked else item.model_copy(update={"revoked": now})
        if revoked is not item:
            index.record(registry, revoked, found.sizes[item.oci_digest])
        publications.append(revoked)
        if item.sqsh is not None and item.sqsh.place:
            store_of(item.sqsh.place, context.site).revoke(item.sqsh.digest, revoked.revoked or now)
    try:
        heads = {tag: move_tag(registry, tag) for tag in dict.fromkeys(item.moving_tag for item in named)}
    except PublicationRefusedError as error:
        raise error.with_context(why=f"The image was taken back, and readers refuse it. {error.why}") from error
    for tag, head in heads.items():
        if head is not None and head.sqsh is not None and head.sqsh.place:
            store_of(head.sqsh.place, context.site).move_tag(tag, head, context.clock())
    nothing = all(item.revoked is not None for item in named)
    return Revoked(publications=tuple(publications), heads=heads, nothing_to_do=nothing)
