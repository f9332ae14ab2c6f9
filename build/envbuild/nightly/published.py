"""Publication as the last step of a target, and what is published as rows of the ledger."""

from __future__ import annotations

import os
from dataclasses import dataclass

from envbuild.catalog.context import Context
from envbuild.catalog.policy import Policy
from envbuild.certify.certificate.trust import Trust
from envbuild.core.errors import InternalError
from envbuild.ledger.models import PublicationRow
from envbuild.nightly.models import Job, Outcome
from envbuild.nightly.records import publication_row
from envbuild.publish.draft import PublishRequest
from envbuild.publish.index import read_index
from envbuild.publish.publish import publish
from envbuild.publish.repository import open_repository


@dataclass(frozen=True, kw_only=True)
class PublishStep:
    """Publishes what was certified, through the gate.

    Attributes:
        to: the repository, HOST/REPO.
        sqsh_to: a .sqsh store; empty: the registry.
    """

    to: str
    policy: Policy
    trust: Trust | None
    sqsh_to: str | None = None

    def publish(self, job: Job, context: Context) -> Outcome:
        """Publish the image of a job; one that is published already costs a few requests.

        Raises:
            PublicationRefusedError: the gate refuses it.
            NetworkError: the registry or the store cannot be reached, or refuses.
        """
        if job.image is None or job.certificate is None:
            raise InternalError("a target is published before it is certified")
        done = publish(
            PublishRequest(
                image=job.image,
                lock=job.lock,
                selection=job.selection,
                to=self.to,
                certificate=job.certificate,
                policy=self.policy,
                trust=self.trust,
                sqsh_to=self.sqsh_to,
            ),
            context,
        )
        row = publication_row(done.publication, repository_name(self.to))
        return Outcome(
            job=job,
            state="nothing" if done.nothing_to_do else "done",
            digest=row.key,
            bytes_sent=done.bytes_sent,
            note=f"{row.tag}, moving tag {row.moving_tag}",
            rows=(row,),
        )


def published_rows(repository: str, context: Context) -> list[PublicationRow]:
    """The rows of everything that a repository's index has.

    Raises:
        CheckRefusedError: the index is damaged.
        NetworkError: the registry cannot be reached, or refuses.
    """
    registry = open_repository(repository, context.site, os.environ)
    return [publication_row(item, repository_name(repository)) for item in read_index(registry)]


def repository_name(text: str) -> str:
    """HOST/REPO, as the ledger has it."""
    return text.removeprefix("oci://").rstrip("/")
