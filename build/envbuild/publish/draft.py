"""The publication as it will be: under which tags, and whether it is there already."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from envbuild import __version__
from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.catalog.fields import MOMENT_FORMAT, moment_of
from envbuild.catalog.policy import Policy
from envbuild.certify.certificate.sign import Signer
from envbuild.certify.certificate.statement import CLOCK_SKEW, is_after
from envbuild.certify.certificate.trust import Trust, require_trust
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import CheckRefusedError, PublicationRefusedError
from envbuild.core.text import printable, quoted_command
from envbuild.image.output import PlacedImage
from envbuild.lock.lockfile import LockDirectory
from envbuild.oci.push import digest_of_tag
from envbuild.oci.referrers import has_api
from envbuild.oci.write import docker_manifest
from envbuild.publish.gate import Admitted
from envbuild.publish.index import is_same
from envbuild.publish.models import Publication, PublishedSqsh, Revocation
from envbuild.publish.moving import refuse_foreign
from envbuild.publish.records import read_entry, revocation_of
from envbuild.publish.signature import objection_to_signature, sign_publication
from envbuild.publish.sqsh_stores import SqshStore, store_of
from envbuild.publish.tags import INDEX_TAG, PUBLICATION_SUFFIX, UNCERTIFIED, Tags, refuse_reserved, tags_of
from envbuild.store.registry import Registry

# Of a clock that is wrong, or a publication that somebody dated so: further ahead it is not looked at.
LONGEST_LEAD = timedelta(days=1)
# So many images of one lock and target nobody publishes: a registry that has every tag would be asked for ever.
MOST_REVISIONS = 1000


@dataclass(frozen=True, kw_only=True)
class Publishing:
    """The destination of publications, and how they are made.

    Attributes:
        to: the repository, ``HOST/REPOSITORY``.
        trust: the keys whose certificates count; None where no trust file is named.
        uncertified: publish without a certificate, under tags that say so.
        allow_dirty: publish an image of a uv project whose files were not all as in its commit.
        moving_tag: instead of the one that follows from the lock and the target.
        sqsh: whether the .sqsh is published, too.
        sqsh_to: the .sqsh store that takes it, instead of the registry.
        mount_from: other repositories of the registry, which blobs are taken over from.
        docker_manifest: push docker's manifest, too; it always is where the registry lacks the referrers API.
        signer: signs the publication and the test result.
    """

    to: str
    policy: Policy
    trust: Trust | None
    uncertified: bool = False
    allow_dirty: bool = False
    moving_tag: str | None = None
    sqsh: bool = True
    sqsh_to: str | None = None
    mount_from: tuple[str, ...] = ()
    docker_manifest: bool = False
    signer: Signer | None = None


@dataclass(frozen=True, kw_only=True)
class PublishRequest(Publishing):
    """An image that is published.

    Attributes:
        selection: of the image: its stack, base and target.
        certificate: its file; None where there is none.
    """

    image: PlacedImage
    lock: LockDirectory
    selection: Selection
    certificate: Path | None


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The registry and store that an image goes to, and their publications.

    Attributes:
        store: takes the .sqsh; None where the registry does.
    """

    registry: Registry
    store: SqshStore | None
    publications: tuple[Publication, ...]


def draft_publication(
    request: PublishRequest, there: Destination, manifest: bytes, admitted: Admitted | None, context: Context
) -> Publication:
    """The publication as it will be, under the tags that are free for it.

    Raises:
        PublicationRefusedError: it was revoked, its moving tag is somebody else's, or this machine's clock is wrong.
        NetworkError: the registry cannot be reached, or refuses.
    """
    registry, publications = there.registry, there.publications
    image, record, target = request.image, request.image.record, request.selection.target
    own = tags_of(
        request.lock.lock, image.lock_name, request.selection.stack, record.target, certified=admitted is not None
    )
    if request.moving_tag is not None:
        front = UNCERTIFIED if admitted is None else ""
        own = Tags(immutable=own.immutable, moving=front + request.moving_tag.removeprefix(front))
    refuse_reserved(own.moving)
    # Whoever may push can list anything under any tag: where readers want a signature, it keeps nobody from publishing.
    counting = (
        publications
        if admitted is None
        else tuple(publication for publication in publications if counts(publication, request, context))
    )
    has_docker = request.docker_manifest or not has_api(registry, record.oci_digest)
    draft = Publication(
        stack=record.stack,
        base=record.base,
        target=record.target,
        lock_name=image.lock_name,
        lock_digest=record.lock_digest,
        oci_digest=record.oci_digest,
        docker_digest=sha256_bytes(docker_manifest(manifest)) if has_docker else None,
        size_bytes=sum(layer.size_bytes for layer in record.layers),
        sqsh=_published_sqsh(request, admitted, there.store, context),
        certificate_digest=admitted.digest if admitted else None,
        keyid=admitted.key.keyid if admitted else None,
        certified_at=admitted.certificate.predicate.issued_at if admitted else None,
        measured_at=admitted.measured_at if admitted else None,
        published_at=_moment(counting, own.moving, context.clock()),
        tag=own.immutable,
        moving_tag=own.moving,
        base_digest=record.base_digest,
        base_rebuilt=record.base_rebuilt,
        gpus=target.sm,
        envbuild=__version__,
    )
    _refuse_revoked_or_other(draft, publications, counting)
    refuse_foreign(registry, draft.moving_tag, publications)
    draft = draft.model_copy(update={"tag": _free_tag(own, draft, registry, publications, context)})
    # Also where the index does not say so: an older one may have been put back.
    if revocation := revocation_of(registry, draft):
        raise _revoked(draft, revocation)
    return draft if request.signer is None or admitted is None else sign_publication(draft, request.signer)


def _published_sqsh(
    request: PublishRequest, admitted: Admitted | None, store: SqshStore | None, context: Context
) -> PublishedSqsh | None:
    record = request.image.record.sqsh
    if record is None or not request.sqsh:
        return None
    if admitted is not None and "sqsh" not in admitted.certificate.by_form():
        context.reporter.note("note: the .sqsh is not published: the certificate is about the OCI image alone")
        return None
    place = store.place_of(record.digest) if store else ""
    return PublishedSqsh(digest=record.digest, size_bytes=record.size_bytes, place=place)


def refuse_other_place(draft: Publication, there: Publication, context: Context) -> None:
    """Refuse to give a .sqsh another place than the index names: a revocation would not reach the one that it has.

    Args:
        there: the publication of the same tag that the draft would replace.

    Raises:
        PublicationRefusedError: it would.
        NetworkError: the place cannot be reached, or refuses.
    """
    place = there.sqsh.place if there.sqsh else ""
    if there.sqsh is None or not place or (draft.sqsh is not None and draft.sqsh.place == place):
        return
    store = store_of(place, context.site)
    if store.has_file(there.sqsh):
        raise PublicationRefusedError(
            f"the .sqsh of {draft.tag} is in {store.address}, and stays there",
            why="It was published there. With another place in the index, a revocation would not reach that one.",
            fix=f"Add {quoted_command('--sqsh-to', store.address)}; the next image may go elsewhere.",
            reason="sqsh-elsewhere",
        )


def _moment(publications: tuple[Publication, ...], moving_tag: str, now: datetime) -> str:
    """The moment of a publication: after that of the last one under its moving tag, whose order it decides."""
    moments = [
        moment_of(publication.published_at)
        for publication in publications
        if publication.moving_tag == moving_tag and not publication.revoked
    ]
    # One that is further ahead counts for no reader either (head_of): it holds nobody back.
    last = max((moment for moment in moments if moment - now <= LONGEST_LEAD), default=None)
    if last is not None and last - now > CLOCK_SKEW:
        raise PublicationRefusedError(
            f"the last publication under {moving_tag} is from the future",
            why=f"It is of {last.strftime(MOMENT_FORMAT)}; this machine's clock says {now.strftime(MOMENT_FORMAT)}.",
            fix="Check the clocks of this machine and of the one that published last. If the other one was wrong, "
            "revoke that publication.",
            reason="clock",
        )
    # Moments have whole seconds, and of two of one second their tags would decide which one is newer.
    return (now if last is None else max(now, last + timedelta(seconds=1))).strftime(MOMENT_FORMAT)


def _refuse_revoked_or_other(
    draft: Publication, publications: tuple[Publication, ...], counting: tuple[Publication, ...]
) -> None:
    """Refuse an image that was revoked, and a moving tag of another lock, base or target.

    Args:
        counting: of the publications those whose tags count.
    """
    for other in publications:
        if other.oci_digest == draft.oci_digest and other.revoked is not None:
            raise _revoked(draft, other.revoked)
    for other in counting:
        if other.oci_digest == draft.oci_digest and not other.is_of_same_image(draft):
            continue  # somebody changed the entry of this very image, which is written anew
        # Empty where it is under another moving tag.
        ours, theirs = (
            (one.stack, one.lock_name, one.base, one.target) if one.moving_tag == draft.moving_tag else ()
            for one in (draft, other)
        )
        if theirs and ours != theirs:
            raise PublicationRefusedError(
                f"the tag {draft.moving_tag} belongs to other images",
                why=f"It is of lock {other.lock_name} (stack {other.stack}) on {other.base} for {other.target}.",
                fix="Publish under another tag (--tag NAME), or to another repository. If nobody published it so, "
                f"remove the tag {INDEX_TAG} there: the next publication writes it anew.",
                reason="tag-of-another",
            )


def _revoked(draft: Publication, revocation: Revocation) -> PublicationRefusedError:
    return PublicationRefusedError(
        f"the image {draft.oci_digest} is not published again",
        why=f"It was revoked at {revocation.at}: {printable(revocation.reason)}",
        fix="Build another image: from a new lock, or with what was wrong put right.",
        reason="revoked",
    )


def _free_tag(
    own: Tags, draft: Publication, registry: Registry, publications: tuple[Publication, ...], context: Context
) -> str:
    """The immutable tag: the first that is this publication's own, or nobody's."""
    by_tag = {publication.tag: publication for publication in publications}
    for number in range(1, MOST_REVISIONS):
        tag = own.revision(number).immutable
        entry = by_tag.get(tag)
        # Without an entry: of a publication that was killed before the index had it.
        if entry is None and digest_of_tag(registry, tag) in (None, draft.oci_digest):
            entry = _recorded(tag + PUBLICATION_SUFFIX, registry, context) or draft
        if entry is not None and is_same(entry, draft):
            return tag
    raise PublicationRefusedError(
        f"{registry.address} has no tag that is free for {own.immutable}",
        why=f"{own.immutable} to {own.revision(MOST_REVISIONS - 1).immutable} are other images there.",
        fix="Remove those that nobody needs (envbuild gc --from), or publish to another repository.",
        reason="no-free-tag",
    )


def _recorded(tag: str, registry: Registry, context: Context) -> Publication | None:
    """The publication under a tag of its own; anything else there is reported, and written over later."""
    try:
        entry = read_entry(registry, tag)
    except CheckRefusedError as error:
        context.reporter.note(f"note: {error.what}, and written anew: {error.why}")
        return None
    return entry[0] if entry is not None else None


def counts(publication: Publication, request: PublishRequest, context: Context) -> bool:
    """Whether readers under the same policy take a publication that is there."""
    if not request.policy.signed_publication:
        return True
    trust = require_trust(request.trust)
    return not objection_to_signature(publication, trust, request.policy, context.clock())


def find_standing(draft: Publication, publications: tuple[Publication, ...], at: datetime) -> Publication | None:
    """The existing publication of the draft's image, if it lacks nothing of the draft and counts at a moment."""
    standing = next((publication for publication in publications if publication.tag == draft.tag), None)
    # True > False: it has no docker manifest, or no signature, and this one would have.
    if standing is None or any(
        (there is None) > (here is None)
        for there, here in ((standing.docker_digest, draft.docker_digest), (standing.signature, draft.signature))
    ):
        return None
    # Somebody dated or described it so that no reader takes it: it is written anew.
    moments = (standing.published_at, standing.certified_at)
    if not standing.is_of_same_image(draft) or any(is_after(moment, at) for moment in moments if moment):
        return None
    if draft.sqsh is not None and standing.sqsh != draft.sqsh:
        return None
    # A certificate of today in the place of last week's is news: the image is good for longer.
    if standing.certificate_digest != draft.certificate_digest and (standing.certified_at or "") < (
        draft.certified_at or ""
    ):
        return None
    return standing
