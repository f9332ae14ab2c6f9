"""``envbuild certify --against``: what a recipe sets, and which of it no case of a certificate covers."""

from __future__ import annotations

from pathlib import Path

from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.fields.against import against
from envbuild.certify.fields.knowledge import recipes, tried_fields
from envbuild.certify.run.job import CertifyRequest, make_job
from envbuild.cli.common import Session
from envbuild.core.errors import ConfigurationError
from envbuild.core.text import shown


def show_against(session: Session, request: CertifyRequest, recipe: str, hub_config: Path | None) -> None:
    """Print a recipe's fields next to those that the certificate of this request accounts for.

    Raises:
        ConfigurationError: there is no such certificate, or it is of a version that accounted for no fields.
        UsageError: there is no such recipe.
    """
    job = make_job(request, session.store)
    if not job.certificate.is_file():
        raise ConfigurationError(
            "there is no certificate to compare the recipe with",
            why=f"A recipe is compared with the cases that passed; {shown(job.certificate)} is not there.",
            fix="Certify first: the same command without --against and --hf-config.",
        )
    predicate = read_certificate(job.certificate)[0].predicate
    if predicate.fields is None:
        raise ConfigurationError(
            f"{shown(job.certificate)} accounts for no fields",
            why="An earlier version of envbuild wrote it, or its driver reports no configuration.",
            fix="Certify again with driver mcore: the same command with --fresh, and without --against.",
        )
    compared = against(predicate.fields, recipe, recipes(), hub_config, tried_fields())
    session.done(
        {
            "recipe": recipe,
            "release": recipes().release,
            "certificate": str(job.certificate.resolve()),
            "matrix": predicate.matrix,
            "fields": compared.as_json(),
        },
        *compared.lines(),
        shown(job.certificate),
    )
