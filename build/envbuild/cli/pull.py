"""``envbuild pull``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.catalog import toml
from envbuild.catalog.catalog import Catalog
from envbuild.catalog.policy import Policy
from envbuild.cli.arguments import parse_age
from envbuild.cli.common import ANY_PATH, Session, as_command
from envbuild.cli.options import argument, flag, option
from envbuild.cli.signing import trust_file, trust_of
from envbuild.core.digests import Json
from envbuild.core.errors import UsageError
from envbuild.publish.pull import DEFAULT_POLICY, Pulled, PullRequest, copied, pull
from envbuild.publish.pull_layout import pull_layout
from envbuild.publish.sources import parse_reference


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    reference: str = argument()
    target: str | None = option("--target NAME", "Refuse an image for another target.")
    form: str = option("--format", "The .sqsh, or an OCI layout.", type=click.Choice(["sqsh", "oci"]), default="sqsh")
    output: Path | None = option(
        "--output PATH",
        "Copy the .sqsh to this file, or write the OCI layout to this folder. By default the .sqsh stays in the store.",
        type=ANY_PATH,
    )
    trust: Path | None = trust_file()
    policy: str | None = option("--policy NAME", "The policy: a name (default: default) or FILE.toml.")
    max_age: str | None = option("--max-age AGE", "Refuse measurements older than this: 12h, 30d, 4w.")
    uncertified: bool = flag("--uncertified", "Also accept an image without a certificate.")


@as_command("pull", PullOptions)
def command(session: Session, options: PullOptions) -> None:
    """Fetch the published image REFERENCE, after verifying its certificate and digest.

    REFERENCE is REGISTRY/REPO:TAG, s3://BUCKET/PREFIX:TAG, gs://BUCKET/PREFIX:TAG or /DIRECTORY:TAG; @sha256:... names
    one image by its digest. The certificate is written next to --output, as PATH.intoto.jsonl.
    """
    output, context = options.output, session.context
    if options.form == "oci" and output is None:
        raise UsageError(
            "--format oci needs --output FOLDER",
            why="It writes an OCI layout.",
            fix="Name a folder that does not exist yet: --output image/",
        )
    request = request_of(
        session,
        options.reference,
        options.target,
        options.max_age,
        options.policy,
        trust=options.trust,
        uncertified=options.uncertified,
    )
    if options.form == "oci" and output is not None:
        pulled = pull_layout(request, output, context)
    else:
        pulled = pull(request, context)
        pulled = pulled if output is None else copied(pulled, output, session.store)
    result = result_of(pulled)
    certified = f"certified by {pulled.key}, measured {result['measured_at']}" if pulled.key else "NOT certified"
    session.done(
        result,
        f"{result['tag']} ({result['target']}): {certified}",
        str(result["digest"]),
        str(result["path"]),
    )


def request_of(
    session: Session,
    reference: str,
    target: str | None,
    max_age: str | None,
    policy: str | None,
    *,
    trust: Path | None = None,
    uncertified: bool = False,
) -> PullRequest:
    """Build the request from options or a site's variables; an empty word counts as none."""
    try:
        age = parse_age(max_age) if max_age else None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return PullRequest(
        reference=parse_reference(reference),
        target=target or None,
        trust=trust_of(session, trust),
        max_age=age,
        policy=_policy_of(session, policy or DEFAULT_POLICY),
        uncertified=uncertified,
    )


def _policy_of(session: Session, named: str) -> Policy:
    """A policy by its name or file; what envbuild ships comes before a file of that name in the current directory."""
    if named.endswith(".toml"):
        why = "It states what must hold before an image is pulled."
        return toml.load(Path(named), Policy, toml.Wanted("the policy", why=why, fix="Name a policy, or its file."))
    shipped = Catalog.shipped()
    return (shipped if named in shipped.names("policies") else session.catalog).policy(named)


# What the JSON object has of a publication.
STATED = {"stack", "base", "target", "tag", "moving_tag", "oci_digest", "lock_digest", "certified_at", "measured_at"}


def result_of(pulled: Pulled) -> dict[str, Json]:
    """The JSON object about a pulled image."""
    publication, sqsh = pulled.publication, pulled.publication.sqsh
    return {
        **publication.model_dump(include=STATED),
        "digest": sqsh.digest if sqsh else None,
        "size_bytes": sqsh.size_bytes if sqsh else 0,
        "key": pulled.key,
        "certificate": str(pulled.certificate) if pulled.certificate else None,
        "path": str(pulled.path),
    }
