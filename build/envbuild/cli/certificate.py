"""``envbuild certificate keygen|show|verify``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from envbuild.catalog.fields import MOMENT_FORMAT
from envbuild.certify.certificate.file import read_certificate
from envbuild.certify.certificate.keys import make_keys, secret_of
from envbuild.certify.certificate.sign import UNSIGNED
from envbuild.certify.certificate.trust import require_trust
from envbuild.certify.certificate.verify import About, oldest_measurement, verify
from envbuild.certify.report.describe import count, describe_gpus, describe_matrix, describe_not_vouched, lines
from envbuild.cli.arguments import parse_age, parse_digest, parse_moment
from envbuild.cli.common import ANY_PATH, FOLDER, Session, as_command, command_group
from envbuild.cli.options import argument, option
from envbuild.cli.signing import trust_file, trust_of
from envbuild.core.digests import Json
from envbuild.core.text import shown

KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def parse_name(text: str) -> str:
    """Check the name of a key's files."""
    if not KEY_NAME.fullmatch(text):
        raise ValueError(f"{text!r}: letters, digits, dots, dashes and underscores")
    return text


@dataclass(frozen=True, kw_only=True)
class KeygenOptions:
    out: Path = option("--out", "The folder for both files.", type=FOLDER, required=True)
    name: str = option("--name", "NAME.key and NAME.pub.", default="envbuild", convert=parse_name)
    password: str | None = option("--password REF", "Encrypt the private key with a password: env:NAME or file:PATH.")


@as_command("keygen", KeygenOptions)
def keygen_command(session: Session, options: KeygenOptions) -> None:
    """Make an Ed25519 key pair: NAME.key (private, mode 600) and NAME.pub. No file is overwritten."""
    password = secret_of(options.password, "the password", os.environ) if options.password else None
    made = make_keys(options.out, options.name, password)
    unlocked = "" if password else " (not locked with a password)"
    session.done(
        {"private": str(made.private.resolve()), "public": str(made.public.resolve()), "keyid": made.keyid},
        f"key {made.keyid}",
        f"private: {shown(made.private)}{unlocked}: keep it to yourself",
        f"public:  {shown(made.public)}: give it to those who are to trust it",
    )


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    file: Path = argument(type=ANY_PATH)


@as_command("show", ShowOptions)
def show_command(session: Session, options: ShowOptions) -> None:
    """Print the certificate FILE. `envbuild certificate verify` checks its signature."""
    statement, opened = read_certificate(options.file)
    if opened.keyid is None:
        session.reporter.note(f"note: {UNSIGNED}")
    session.done(
        {"verified": False, "keyid": opened.keyid, "statement": statement.model_dump(mode="json", by_alias=True)},
        *lines(statement, opened.keyid),
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    file: Path = argument(type=ANY_PATH)
    trust: Path | None = trust_file()
    image: Path | None = option(
        "--image",
        "Require that it covers this .sqsh, OCI layout (FOLDER[:TAG]) or folder of out/images.",
        type=ANY_PATH,
    )
    digest: str | None = option("--digest sha256:...", "Require that it covers this digest.", convert=parse_digest)
    lock: Path | None = option("--lock", "Require that it covers this lock directory.", type=FOLDER)
    at: datetime | None = option("--at MOMENT", "Verify as of this moment instead of now.", convert=parse_moment)
    max_age: timedelta | None = option(
        "--max-age AGE", "Refuse measurements older than this: 12h, 30d, 4w.", convert=parse_age
    )


@as_command("verify", VerifyOptions)
def verify_command(session: Session, options: VerifyOptions) -> None:
    """Verify that a trusted, valid key signed the certificate FILE, and that it covers the image or lock named.

    A refused certificate is exit code 12. Without --image, --digest and --lock only the signer is verified.
    """
    at = options.at or session.context.clock()
    about = About(image=options.image, digest=options.digest, lock=options.lock)
    # No default: a key that came with the certificate would prove nothing.
    trusted = require_trust(trust_of(session, options.trust))
    verified = verify(options.file, trusted, about, at=at, max_age=options.max_age)
    statement, key, predicate = verified.statement, verified.key, verified.statement.predicate
    machine = predicate.measured.machine
    result: dict[str, Json] = {
        "verified": True,
        "at": at.strftime(MOMENT_FORMAT),
        "key": {"name": key.name, "keyid": key.keyid},
        "subject": dict(statement.digests()),
        **predicate.model_dump(
            mode="json",
            include={
                *("stack", "base", "target", "form", "launcher", "lock_digest", "matrix", "matrix_digest"),
                *("matrix_is_shipped", "whole_matrix", "issued_at", "not_vouched"),
            },
        ),
        "gpus": [gpu.name for gpu in machine.gpus] if machine else [],
        "cases": len(predicate.cases),
        "oldest_measurement": oldest_measurement(statement),
        "compared": list(verified.compared),
    }
    matrix = describe_matrix(predicate)
    whole = matrix if predicate.whole_matrix else f"a PART of {matrix}"
    session.done(
        result,
        f"verified: signed by {key.name} (key {key.keyid[:16]}), issued {predicate.issued_at}",
        f"certified: {predicate.stack} on {predicate.base} for {predicate.target} passed {whole} "
        f"({count(predicate.cases)}), run in {predicate.place} with {describe_gpus(predicate.measured)}",
        *(f"about: {name} {value}" for name, value in statement.digests().items()),
        *(f"compared here: {text}" for text in verified.compared),
        *(f"not vouched for: {describe_not_vouched(entry)}" for entry in predicate.not_vouched),
        *([] if verified.compared else ["nothing was compared: name your image with --image, --digest or --lock"]),
    )


command = command_group(
    "certificate",
    "Make signing keys; show a certificate; verify who signed it and what it covers.",
    *(keygen_command, show_command, verify_command),
)
