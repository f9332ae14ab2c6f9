"""``envbuild certificate keygen|show|verify``."""

from __future__ import annotations

import os
import re
from datetime import datetime, timedelta
from pathlib import Path

import click

from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.certificate.keys import make_keys, secret_of
from envbuild.certify.certificate.sign import UNSIGNED
from envbuild.certify.certificate.trust import require_trust
from envbuild.certify.certificate.verify import About, oldest_measurement, verify
from envbuild.certify.report.describe import count, describe_gpus, describe_matrix, describe_not_vouched, lines
from envbuild.cli.arguments import parse_age, parse_digest, parse_moment
from envbuild.cli.command import Command, CommandGroup, hands_over
from envbuild.cli.common import PathArgument, Session, output_options
from envbuild.cli.signing import trust_of
from envbuild.core.digests import Json
from envbuild.core.text import shown

KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def parse_name(context: click.Context, parameter: click.Parameter, value: str) -> str:  # noqa: ARG001
    """What a key's files are called."""
    if not KEY_NAME.fullmatch(value):
        raise click.BadParameter(f"{value!r}: letters, digits, dots, dashes and underscores")
    return value


@click.group("certificate", cls=CommandGroup, invoke_without_command=True)
@output_options
@click.pass_context
def command(context: click.Context, session: Session) -> None:  # noqa: ARG001
    """Make signing keys; show a certificate; verify who signed it and what it is about."""
    if not hands_over(context):
        # click alone would print the help, and end with 0 before 8.2 and with 2 from it on.
        raise click.UsageError(f"which command? There are: {', '.join(command.commands)}", context)


@command.command("keygen")
@click.option("--out", "folder", type=PathArgument(file_okay=False), required=True, help="The folder for both files.")
@click.option("--name", default="envbuild", show_default=True, callback=parse_name, help="NAME.key and NAME.pub.")
@click.option("--password", metavar="REF", help="Lock the private key with a password: env:NAME or file:PATH.")
@output_options
def keygen_command(session: Session, folder: Path, name: str, password: str | None) -> None:
    """Make an Ed25519 key pair: NAME.key (private, mode 600) and NAME.pub. No file is overwritten."""
    made = make_keys(folder, name, secret_of(password, "the password", os.environ) if password else None)
    session.done(
        {"private": str(made.private.resolve()), "public": str(made.public.resolve()), "keyid": made.keyid},
        f"key {made.keyid}",
        f"private: {shown(made.private)}{'' if password else ' (not locked with a password)'}: keep it to yourself",
        f"public:  {shown(made.public)}: give it to those who are to trust it",
    )


@command.command("show", cls=Command)
@click.argument("file", type=PathArgument())
@output_options
def show_command(session: Session, file: Path) -> None:
    """Print the certificate FILE. `envbuild certificate verify` checks its signature."""
    statement, opened = read_certificate(file)
    keyid = opened.keyid
    if keyid is None:
        session.reporter.note(f"note: {UNSIGNED}")
    session.done(
        {"verified": False, "keyid": keyid, "statement": statement.model_dump(mode="json", by_alias=True)},
        *lines(statement, keyid),
    )


@command.command("verify", cls=Command)
@click.argument("file", type=PathArgument())
@click.option(
    "--trust", type=PathArgument(dir_okay=False), help="The keys that you trust; default: the configuration's."
)
@click.option(
    "--image",
    type=PathArgument(),
    help="It must be about this .sqsh, OCI layout (FOLDER[:TAG]) or folder of out/images.",
)
@click.option("--digest", metavar="sha256:...", callback=parse_digest, help="It must be about this digest.")
@click.option("--lock", type=PathArgument(file_okay=False), help="It must be about this lock directory.")
@click.option("--at", metavar="MOMENT", callback=parse_moment, help="Verify for this moment instead of now.")
@click.option("--max-age", metavar="AGE", callback=parse_age, help="The oldest numbers in it: 12h, 30d, 4w at most.")
@output_options
def verify_command(
    session: Session,
    file: Path,
    trust: Path | None,
    image: Path | None,
    digest: str | None,
    lock: Path | None,
    at: datetime,
    max_age: timedelta | None,
) -> None:
    """Verify that the certificate FILE is signed by a trusted key, in its time, and is about what you name.

    Exit code 12 and the reason where it does not count.
    """
    # No default: a key that came with the certificate would prove nothing.
    trusted = require_trust(trust_of(session, trust))
    found = verify(file, trusted, About(image=image, digest=digest, lock=lock), at=at, max_age=max_age)
    predicate = found.statement.predicate
    machine = predicate.measured.machine
    result: dict[str, Json] = {
        "verified": True,
        "at": at.strftime(MOMENT_FORMAT),
        "key": {"name": found.key.name, "keyid": found.key.keyid},
        "subject": dict(found.statement.digests()),
        "stack": predicate.stack,
        "base": predicate.base,
        "target": predicate.target,
        "form": predicate.form,
        "launcher": predicate.launcher,
        "gpus": [gpu.name for gpu in machine.gpus] if machine else [],
        "lock_digest": predicate.lock_digest,
        "matrix": predicate.matrix,
        "matrix_digest": predicate.matrix_digest,
        "matrix_is_shipped": predicate.matrix_is_shipped,
        "whole_matrix": predicate.whole_matrix,
        "cases": len(predicate.cases),
        "issued_at": predicate.issued_at,
        "oldest_measurement": oldest_measurement(found.statement),
        "compared": list(found.compared),
        "not_vouched": [item.model_dump(mode="json") for item in predicate.not_vouched],
    }
    matrix = describe_matrix(predicate)
    whole = matrix if predicate.whole_matrix else f"a PART of {matrix}"
    session.done(
        result,
        f"verified: signed by {found.key.name} (key {found.key.keyid[:16]}), issued {predicate.issued_at}",
        f"certified: {predicate.stack} on {predicate.base} for {predicate.target} passed {whole} "
        f"({count(predicate.cases)}), run in {predicate.place} with {describe_gpus(predicate.measured)}",
        *(f"about: {name} {value}" for name, value in found.statement.digests().items()),
        *(f"compared here: {text}" for text in found.compared),
        *(f"not vouched for: {describe_not_vouched(item)}" for item in predicate.not_vouched),
        *([] if found.compared else ["nothing was compared: name your image with --image, --digest or --lock"]),
    )
