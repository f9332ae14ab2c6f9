"""Publication as the last step of a target, and what is published as rows of the ledger."""

from __future__ import annotations

from dataclasses import replace

from envbuild.catalog.context import Context
from envbuild.certify.certificate.statement import CERTIFICATE_FILE
from envbuild.core.errors import CertificateRefusedError, InternalError
from envbuild.core.files import write_atomic
from envbuild.image.output import PlacedImage
from envbuild.ledger.models import PublicationRow, Row
from envbuild.nightly.models import Job, Outcome
from envbuild.nightly.records import certificate_rows, publication_row
from envbuild.publish.draft import Publishing, PublishRequest
from envbuild.publish.index import load_all
from envbuild.publish.publish import publish
from envbuild.publish.repository import open_repository
from envbuild.publish.sources import open_source
from envbuild.publish.sqsh_stores import store_of


def publish_job(job: Job, publishing: Publishing, context: Context) -> Outcome:
    """Publish the certified image of a job; one that is published already costs a few requests.

    Raises:
        PublicationRefusedError: the gate refuses it.
        NetworkError: the registry or the store cannot be reached, or refuses.
    """
    if job.image is None or job.certificate is None:
        raise InternalError("a target is published before it is certified")
    if publishing.sqsh and publishing.sqsh_to is None:
        publishing = replace(publishing, sqsh_to=_store_with_it(job.image, publishing.to, context))
    request = PublishRequest(
        **vars(publishing), image=job.image, lock=job.lock, selection=job.selection, certificate=job.certificate
    )
    done = publish(request, context)
    row = publication_row(done.publication, repository_name(publishing.to))
    return Outcome(
        job=job,
        state="nothing" if done.nothing_to_do else "done",
        digest=row.key,
        bytes_sent=done.bytes_sent,
        note=f"{row.tag}, moving tag {row.moving_tag}",
        rows=(row,),
    )


def _store_with_it(image: PlacedImage, to: str, context: Context) -> str | None:
    """The .sqsh store that has the image already: it was published by hand, say, with --sqsh-to."""
    for publication in load_all(open_repository(to, context.site)).publications:
        sqsh = publication.sqsh
        if publication.oci_digest == image.record.oci_digest and sqsh is not None and sqsh.place:
            store = store_of(sqsh.place, context.site)
            # The index is written by whoever may push: nothing is sent to a place for its sake alone.
            return store.address if store.has_image(publication) else None
    return None


def published_rows(repository: str, context: Context) -> list[PublicationRow]:
    """The rows of everything that a repository's index has.

    Raises:
        CheckRefusedError: the index is damaged.
        NetworkError: the registry cannot be reached, or refuses.
    """
    source = open_source(repository, context.site)
    return [publication_row(publication, repository_name(repository)) for publication in source.publications()]


def rebuilt_rows(repository: str, context: Context) -> list[Row]:
    """The rows of everything that a repository's index has, with those of the certificates that are attached there.

    Raises:
        CheckRefusedError: the index is damaged.
        NetworkError: the registry cannot be reached, or refuses.
    """
    source = open_source(repository, context.site)
    rows: list[Row] = []
    with context.store.staging("ledger") as folder:
        for publication in source.publications():
            rows.append(publication_row(publication, repository_name(repository)))
            try:
                content = source.certificate(publication)
                # It was published without one, or a retention rule took it: what the index states is kept.
                if content is None:
                    continue
                write_atomic(folder / CERTIFICATE_FILE, content)
                rows += certificate_rows(folder / CERTIFICATE_FILE)
            except CertificateRefusedError as error:
                context.reporter.note(f"note: the certificate of {publication.tag} is left out: {error.why}")
    return rows


def repository_name(text: str) -> str:
    """HOST/REPO, as the ledger has it."""
    return text.removeprefix("oci://").rstrip("/")
