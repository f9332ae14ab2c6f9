"""``envbuild pull``. In a job most of its processes follow the first one (``follow``), and never come here."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.catalog import toml
from envbuild.catalog.catalog import Catalog
from envbuild.catalog.policy import Policy
from envbuild.cli.arguments import parse_age
from envbuild.cli.command import Command
from envbuild.cli.common import PathArgument, Session, output_options
from envbuild.cli.follow import leave, place
from envbuild.cli.signing import trust_of
from envbuild.core.digests import Json
from envbuild.core.errors import UsageError
from envbuild.core.text import printable_lines
from envbuild.publish.pull import DEFAULT_POLICY, Pulled, PullRequest, pull
from envbuild.publish.pull_layout import pull_layout
from envbuild.publish.sources import parse_reference


@click.command("pull", cls=Command)
@click.argument("reference")
@click.option("--target", metavar="NAME", help="The image must be for this target.")
@click.option("--format", "form", type=click.Choice(["sqsh", "oci"]), default="sqsh", show_default=True)
@click.option(
    "--output",
    type=PathArgument(),
    metavar="PATH",
    help="Where to: the .sqsh, or the folder of an OCI layout. Default for a .sqsh: it stays in the store.",
)
@click.option(
    "--trust", type=PathArgument(dir_okay=False), help="The keys that you trust; default: the configuration's."
)
@click.option("--policy", metavar="NAME", help="What must hold: a policy's name, or its FILE.toml; default: default.")
@click.option("--max-age", metavar="AGE", help="The oldest numbers in the certificate: 12h, 30d, 4w at most.")
@click.option("--uncertified", is_flag=True, help="Take an image without a certificate, too.")
@output_options
def command(
    session: Session,
    reference: str,
    target: str | None,
    form: str,
    output: Path | None,
    trust: Path | None,
    policy: str | None,
    max_age: str | None,
    uncertified: bool,
) -> None:
    """Fetch the published image REFERENCE: its certificate and its digest are verified before it has its name.

    REFERENCE is REGISTRY/REPO:TAG, s3://BUCKET/PREFIX:TAG, gs://BUCKET/PREFIX:TAG or /DIRECTORY:TAG; @sha256:... names
    one image by its digest. A certificate goes next to --output, as PATH.intoto.jsonl.
    """
    layout = output if form == "oci" else None
    if form == "oci" and layout is None:
        raise UsageError(
            "--format oci needs --output FOLDER",
            why="It writes an OCI layout.",
            fix="Name a folder that does not exist yet: --output image/",
        )
    request = request_of(session, reference, target, max_age, policy, trust=trust, uncertified=uncertified)
    context = session.context
    pulled = pull(request, context) if layout is None else pull_layout(request, layout, context)
    result = result_of(pulled)
    certified = f"certified by {pulled.key}, measured {result['measured_at']}" if pulled.key else "NOT certified"
    lines = [f"{result['tag']} ({result['target']}): {certified}", str(result["digest"])]
    if form == "sqsh":
        # Before the file gets its name here: those who follow have an --output of their own.
        leave(pulled.asked, result, [printable_lines(line) for line in lines])
        result["path"] = place(result, str(output)) if output is not None else result["path"]
    session.done(result, *lines, str(result["path"]))


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
    """What options or a site's variables ask for; an empty word is none."""
    context = click.get_current_context()
    return PullRequest(
        reference=parse_reference(reference),
        target=target or None,
        trust=trust_of(session, trust),
        # Not by the option's callback, since the importer has it from a variable; click gives callbacks the parameter,
        # which is not read.
        max_age=parse_age(context, context.command.params[0], max_age or None),
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


def result_of(pulled: Pulled) -> dict[str, Json]:
    """What ``--json`` prints about a pulled image."""
    publication, sqsh = pulled.publication, pulled.publication.sqsh
    return {
        "stack": publication.stack,
        "base": publication.base,
        "target": publication.target,
        "tag": publication.tag,
        "moving_tag": publication.moving_tag,
        "digest": sqsh.digest if sqsh else None,
        "size_bytes": sqsh.size_bytes if sqsh else 0,
        "oci_digest": publication.oci_digest,
        "lock_digest": publication.lock_digest,
        "key": pulled.key,
        "certified_at": publication.certified_at,
        "measured_at": publication.measured_at,
        "certificate": str(pulled.certificate) if pulled.certificate else None,
        "path": str(pulled.path),
    }
