"""Fetches a published image: finds it, verifies its certificate, and keeps what came in the store, by its digest."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.context import Context
from envbuild.catalog.policy import Policy
from envbuild.certify.certificate.statement import CERTIFICATE_FILE
from envbuild.certify.certificate.trust import Trust, require_trust
from envbuild.certify.certificate.verify import About, VerifiedCertificate, verify
from envbuild.core import locks
from envbuild.core.digests import digest_of, sha256_bytes, short
from envbuild.core.errors import (
    CertificateRefusedError,
    ConfigurationError,
    NetworkError,
    PublicationRefusedError,
)
from envbuild.core.files import clone_or_copy, write_atomic
from envbuild.core.text import printable
from envbuild.publish.admission import objections_to
from envbuild.publish.kept_files import KeptFile, WantedFile, keep_file
from envbuild.publish.models import Publication, PublishedSqsh
from envbuild.publish.sources import Reference, Source, open_source
from envbuild.publish.tags import UNCERTIFIED
from envbuild.store.local import LocalStore

SQSH_KIND, CERTIFICATE_KIND, COPIED_KIND = "sqsh", "certificates", "sqsh-copied"
# Of the certificate next to a copy of its .sqsh.
CERTIFICATE_SUFFIX = ".intoto.jsonl"
# How often a tag may move while what it meant is fetched.
MOST_MOVES = 5
LOOK = "`envbuild status` lists what the ledger has."
MOST_TAGS = 10
DEFAULT_POLICY = "default"


@dataclass(frozen=True, kw_only=True)
class PullRequest:
    """A request for a published image.

    Attributes:
        target: it must be for this one; None: any.
        trust: the keys whose certificates count; None where none are named.
        max_age: how old the certificate's numbers may be.
        policy: what must hold, as it did when the image was published.
        uncertified: an image without a certificate will do.
    """

    reference: Reference
    target: str | None = None
    trust: Trust | None = None
    max_age: timedelta | None = None
    policy: Policy = field(default_factory=lambda: Catalog.shipped().policy(DEFAULT_POLICY))
    uncertified: bool = False


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """A .sqsh that is in the store.

    Attributes:
        path: where it is; it stays what it is as long as nobody writes to it.
        certificate: the file of its certificate; None without one.
        key: the name of the key that signed it.
        downloaded: this call did.
    """

    publication: Publication
    path: Path
    certificate: Path | None
    key: str | None
    downloaded: bool


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A publication in the store, in one of its forms.

    Attributes:
        verified: its certificate; None: it needs none.
        anew: by this call.
        place: puts it where it is asked for, and says where that is.
    """

    verified: VerifiedCertificate | None
    anew: bool
    place: Callable[[], Path]


def pull(request: PullRequest, context: Context) -> Pulled:
    """Bring the .sqsh of a published image into the store, once for all who ask for it.

    Raises:
        PublicationRefusedError: it was taken back, is not certified, has no .sqsh, or is for another target.
        CertificateRefusedError: its certificate does not count, or the index states something else.
        CheckRefusedError: what came is not what was published, or the publication is damaged.
        ConfigurationError: there is no such publication.
        NetworkError: the place cannot be reached or refuses.
    """
    source = open_source(request.reference.place, context.site)

    def fetch(publication: Publication) -> Fetched:
        if publication.sqsh is None:
            raise _refused(request, "no-sqsh", "It was published without a .sqsh.", "Pull it as --format oci.")
        verified = admit(publication, publication.sqsh.digest, request, source, context)
        kept = _fetch(publication, publication.sqsh, source, context)
        return Fetched(verified=verified, anew=kept.fetched, place=lambda: kept.path)

    return pull_with(fetch, request, source, context)


def pull_with(
    fetch: Callable[[Publication], Fetched], request: PullRequest, source: Source, context: Context
) -> Pulled:
    """Fetch what the reference means, and again where that was changed meanwhile.

    Raises:
        NetworkError: it is changed all the time.
    """
    for _ in range(MOST_MOVES):
        publication = find(request, source, context)
        fetched = fetch(publication)
        # A download takes minutes: the tag may have moved, and what it meant may have been taken back.
        if fetched.anew and find(request, source, context) != publication:
            context.reporter.note(f"{request.reference} was changed meanwhile: fetched again")
            continue
        return _pulled(publication, fetched, context)
    raise NetworkError(
        f"{request.reference} keeps changing",
        why=f"It was changed {MOST_MOVES} times, each time while it was fetched.",
        fix="Name a digest, or an immutable tag.",
    )


def find(request: PullRequest, source: Source, context: Context) -> Publication:
    """The publication that the reference names; a tag may be without its target.

    Raises:
        ConfigurationError: it means nothing there.
        PublicationRefusedError: it is for another target.
        CertificateRefusedError: it leads to a publication of other tags.
    """
    reference, target, at = request.reference, request.target, context.clock()
    name = reference.name
    publication = source.find(name, at)
    if publication is None and target is not None and not reference.is_digest:
        name = f"{reference.name}-{target}"
        publication = source.find(name, at)
    if publication is None:
        raise ConfigurationError(
            f"nothing is published as {reference}",
            why=f"{source.address} has no such {'digest' if reference.is_digest else 'tag'}. {_known_tags(source)}",
            fix="Name a tag or a digest of what is there.",
        )
    if name not in (publication.tag, publication.moving_tag, *publication.digests):
        raise CertificateRefusedError(
            f"{reference} is not pulled",
            why=f"It was changed: it leads to {publication.tag}, whose moving tag is {publication.moving_tag}.",
            fix="Find out who changed the publication, and publish the image again.",
            reason="entry",
        )
    if target is not None and publication.target != target:
        raise _refused(
            request, "target", f"It is for {publication.target}, not for {target}.", f"Name another tag. {LOOK}"
        )
    return publication


def _known_tags(source: Source) -> str:
    tags = sorted({publication.moving_tag for publication in source.publications() if publication.revoked is None})
    more = f" and {len(tags) - MOST_TAGS} more" if len(tags) > MOST_TAGS else ""
    return f"Its moving tags are {', '.join(tags[:MOST_TAGS])}{more}." if tags else "It has no moving tag."


def admit(
    publication: Publication, digest: str, request: PullRequest, source: Source, context: Context
) -> VerifiedCertificate | None:
    """Verify the certificate of a publication, and that both are about the same image; None: it needs none.

    Args:
        digest: of the form of the image that is fetched.

    Raises:
        PublicationRefusedError: it was taken back, or has no certificate.
        CertificateRefusedError: its certificate does not count, or the entry states something else.
        UsageError: no trusted keys are named.
    """
    if publication.revoked is not None:
        why = f"It was taken back at {publication.revoked.at}: {printable(publication.revoked.reason)}"
        raise _refused(request, "revoked", why, f"Pull another one. {LOOK}")
    if publication.certificate_digest is None:
        if request.uncertified:
            _refuse_certified_tag(publication, request)
            return None
        why = "It was published without a certificate: nobody vouches for what it computes."
        raise _refused(request, "uncertified", why, f"Pull a certified one, or add --uncertified. {LOOK}")
    trust, at = require_trust(request.trust), context.clock()
    file = _certificate(publication, source, context)
    try:
        verified = verify(file, trust, About(digest=digest), at=at, max_age=request.max_age)
    except CertificateRefusedError as error:
        what = f"the certificate of {request.reference} is refused"
        raise CertificateRefusedError(what, why=error.why, fix=error.fix, reason=error.reason) from error
    for objection in objections_to(publication, verified, request.policy, trust, at):
        raise CertificateRefusedError(
            f"{request.reference} is not pulled", why=objection.why, fix=objection.fix, reason=objection.reason
        )
    return verified


def _refuse_certified_tag(publication: Publication, request: PullRequest) -> None:
    """Refuse an image without a certificate under a tag of those that have one: nobody publishes it so."""
    if not request.reference.is_digest and not publication.moving_tag.startswith(UNCERTIFIED):
        why = f"It has no certificate, and its tags do not begin with {UNCERTIFIED}: its entry was changed."
        raise _refused(request, "tag", why, "Find out who changed the publication, or name its digest.")


def _certificate(publication: Publication, source: Source, context: Context) -> Path:
    """The file of a publication's certificate, kept in the store by its digest."""
    digest = str(publication.certificate_digest)

    def fetch(folder: Path) -> None:
        content = source.certificate(publication)
        if content is None or sha256_bytes(content) != digest:
            raise CertificateRefusedError(
                f"the certificate of {publication.tag} is refused",
                why=f"{source.address} has {'another one' if content else 'none'} in its place; {digest} is stated.",
                fix="Publish the image again. Retention rules must spare what refers to a kept image.",
            )
        write_atomic(folder / CERTIFICATE_FILE, content)

    return context.store.get_or_build(CERTIFICATE_KIND, digest, fetch).path / CERTIFICATE_FILE


def _fetch(publication: Publication, sqsh: PublishedSqsh, source: Source, context: Context) -> KeptFile:
    wanted = WantedFile(
        kind=SQSH_KIND,
        digest=sqsh.digest,
        size_bytes=sqsh.size_bytes,
        name=f"the .sqsh of {publication.tag}",
        where=sqsh.place or source.address,
    )
    with context.reporter.step(f"{publication.tag}: {short(sqsh.digest)}, {sqsh.size_bytes} bytes"):
        return keep_file(context.store, wanted, partial(source.download_sqsh, sqsh))


def _pulled(publication: Publication, fetched: Fetched, context: Context) -> Pulled:
    verified = fetched.verified
    folder = context.store.path_of(CERTIFICATE_KIND, str(publication.certificate_digest))
    return Pulled(
        publication=publication,
        path=fetched.place(),
        certificate=folder / CERTIFICATE_FILE if verified else None,
        key=verified.key.name if verified else None,
        downloaded=fetched.anew,
    )


def copied(pulled: Pulled, output: Path, store: LocalStore) -> Pulled:
    """Copy the pulled .sqsh to ``output``, and its certificate next to it."""
    output = output.absolute()
    _copy_once(pulled.path, output, store)
    if pulled.certificate is not None:
        _copy_once(pulled.certificate, output.with_name(output.name + CERTIFICATE_SUFFIX), store)
    return replace(pulled, path=output)


def _copy_once(source: Path, target: Path, store: LocalStore) -> None:
    """Copy a file of the store: once for all processes of one target, unless it was changed since."""
    if not store.is_writable:
        clone_or_copy(source, target)
        return

    def note() -> str:
        info = target.lstat()
        # Its change time is set by the kernel alone (utimensat(2)).
        state = [info.st_dev, info.st_ino, info.st_size, info.st_ctime_ns]
        return digest_of({"source": str(source), "target": str(target), "state": [str(number) for number in state]})

    # The one lock of the target: the ranks of a job that wait for it find the note.
    with locks.exclusive(store.lock_of(COPIED_KIND, sha256_bytes(os.fsencode(target)))):
        if not os.path.lexists(target) or store.find(COPIED_KIND, note()) is None:
            clone_or_copy(source, target)
            store.get_or_build(COPIED_KIND, note(), lambda _: None)


def _refused(request: PullRequest, reason: str, why: str, fix: str) -> PublicationRefusedError:
    return PublicationRefusedError(f"{request.reference} is not pulled", why=why, fix=fix, reason=reason)
