"""``envbuild publish``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from envbuild.catalog.catalog import Selection
from envbuild.certify.certificate.statement import CERTIFICATE_FILE
from envbuild.cli.arguments import parse_digest, refuse_place_of_no_sqsh
from envbuild.cli.command import Command, given_options
from envbuild.cli.common import (
    PathArgument,
    Session,
    name_option,
    out_dir_option,
    output_options,
    selection_options,
)
from envbuild.cli.signing import key_options, signer_of, trust_of
from envbuild.core.digests import Json
from envbuild.core.errors import EnvbuildError, UsageError
from envbuild.core.text import quoted_command
from envbuild.image.output import PlacedImage, find_image
from envbuild.lock.lockdir import find_lock
from envbuild.publish.base import PublishedBase, publish_base
from envbuild.publish.draft import PublishRequest
from envbuild.publish.models import Publication
from envbuild.publish.publish import Published, publish
from envbuild.publish.revoke import Revoked, revoke

# All that goes with --revoke, itself the parameter `digest`.
REVOKING = {"to", "digest", "reason", "sqsh_to", "as_json", "quiet"}
# With these alone the base itself is published.
BASE = {"base", "to", "as_json", "quiet"}


@click.command("publish", cls=Command)
@selection_options
@name_option
@click.option("--to", metavar="REGISTRY/REPO", required=True, help="The repository that takes the image.")
@click.option("--sqsh-to", metavar="PLACE", help="Put the .sqsh into s3://B/P, gs://B/P or DIR, not into the registry.")
@click.option("--no-sqsh", is_flag=True, help="Do not publish the .sqsh.")
@click.option("--tag", metavar="NAME", help="The moving tag; default: LOCK[-BRANCH]-TARGET.")
@click.option("--policy", metavar="NAME", default="default", show_default=True, help="What must hold (envs/policies/).")
@click.option(
    "--certificate", metavar="FILE", type=PathArgument(), help="Default: the newest of the image in --out-dir."
)
@click.option(
    "--trust", type=PathArgument(dir_okay=False), help="The keys that you trust; default: the configuration's."
)
@click.option(
    "--uncertified", is_flag=True, help="Publish without a certificate, under tags that begin with that word."
)
@click.option(
    "--docker-manifest", is_flag=True, help="Also push docker's manifest, where the registry does not need it."
)
@click.option("--mount-from", metavar="REPO", multiple=True, help="Take layers over from this repository there.")
@click.option("--revoke", "digest", metavar="DIGEST", callback=parse_digest, help="Take back what has this digest.")
@click.option("--reason", metavar="TEXT", help="Why; with --revoke.")
@key_options
@out_dir_option
@output_options
def command(session: Session, **values: Any) -> None:
    """Publish a certified image: to a registry, with its certificate, SBOMs and .sqsh attached.

    Without a certificate that counts nothing is published (exit code 9). An immutable tag names this lock and target;
    the moving tag follows once everything is there.

    With --base and --to alone, the base itself is published: locks that were verified on it name its digest.
    """
    arguments = Arguments(**values)
    if arguments.digest is not None:
        _refuse_other_options(click.get_current_context())
        reason = arguments.reason or ""
        if not reason.strip():
            raise UsageError(
                "--revoke needs --reason TEXT",
                why="Whoever meets the revoked image is shown it.",
                fix="Write why, in one sentence.",
            )
        revoked = revoke(arguments.to, arguments.digest, reason, session.context, sqsh_to=arguments.sqsh_to)
        _keep(session, arguments.to, revoked.publications)
        _print_revoked(session, revoked, _commands_elsewhere(session, arguments.to, revoked.publications, reason))
        return
    refuse_place_of_no_sqsh(arguments.no_sqsh, arguments.sqsh_to)
    if arguments.reason is not None:
        raise UsageError(
            "--reason has no effect without --revoke", why="It is why.", fix="Name a digest, or leave it out."
        )
    if arguments.base is not None and given_options(click.get_current_context()) <= BASE:
        # A base is made without a stack or a target.
        alone = Selection(session.catalog, stack_name="", base_name=arguments.base, target_name="")
        _print_base(session, publish_base(alone, arguments.to, session.context))
        return
    selection = session.select_locked(arguments.stack, arguments.target, arguments.base, arguments.name)
    done = publish(_request(session, selection, arguments), session.context)
    _keep(session, arguments.to, [done.publication])
    _print(session, done)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    stack: str
    base: str | None
    target: str | None
    name: str | None
    to: str
    sqsh_to: str | None
    no_sqsh: bool
    tag: str | None
    policy: str
    certificate: Path | None
    trust: Path | None
    uncertified: bool
    docker_manifest: bool
    mount_from: tuple[str, ...]
    digest: str | None
    reason: str | None
    key: str | None
    key_password: str | None
    out_dir: Path


def _request(session: Session, selection: Selection, arguments: Arguments) -> PublishRequest:
    names = (selection.stack_name, selection.base_name, selection.target_name)
    image = find_image(arguments.out_dir, *names, arguments.name)
    return PublishRequest(
        image=image,
        lock=find_lock(session.project, selection, arguments.name),
        selection=selection,
        to=arguments.to,
        certificate=arguments.certificate or newest_certificate(arguments.out_dir, image),
        policy=session.catalog.policy(arguments.policy),
        trust=trust_of(session, arguments.trust),
        uncertified=arguments.uncertified,
        moving_tag=arguments.tag,
        sqsh=not arguments.no_sqsh,
        sqsh_to=arguments.sqsh_to,
        mount_from=arguments.mount_from,
        docker_manifest=arguments.docker_manifest,
        signer=signer_of(session, arguments.key, arguments.key_password),
    )


def _keep(session: Session, to: str, publications: Sequence[Publication]) -> None:
    """Write publications into the ledger; what is published stays published where that fails."""
    from envbuild.ledger.ledger import Ledger
    from envbuild.nightly.published import repository_name
    from envbuild.nightly.records import publication_row

    try:
        with Ledger.open(session.ledger_file) as ledger:
            ledger.record(*[publication_row(item, repository_name(to)) for item in publications])
    except EnvbuildError as error:
        session.reporter.note(f"note: the ledger was not written: {error.what}. {error.why}")


def _commands_elsewhere(session: Session, to: str, publications: Sequence[Publication], reason: str) -> list[str]:
    """What revokes images in other repositories of the ledger, too; nothing where it cannot be read."""
    from envbuild.ledger.ledger import Ledger
    from envbuild.ledger.models import PublicationRow
    from envbuild.nightly.published import repository_name

    try:
        with Ledger.read(session.ledger_file) as ledger:
            rows = ledger.rows(PublicationRow)
    except EnvbuildError:
        return []  # as a note has said
    images = {publication.oci_digest for publication in publications}
    places = {
        (row.repository, row.oci_digest)
        for row in rows
        if row.oci_digest in images and row.repository != repository_name(to) and row.revoked_at is None
    }
    front = ("envbuild", "publish", "--to")
    return [quoted_command(*front, place, "--revoke", image, "--reason", reason) for place, image in sorted(places)]


def newest_certificate(out_dir: Path, image: PlacedImage) -> Path | None:
    """The certificate of an image that was written last; None where there is none."""
    found = (out_dir / "certificates" / image.name).glob(f"*/{CERTIFICATE_FILE}")
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _refuse_other_options(context: click.Context) -> None:
    if others := given_options(context) - REVOKING:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(others))
        raise UsageError(
            f"{flags} has no effect with --revoke", why="The digest names what is revoked.", fix=f"Leave {flags} out."
        )


def _print(session: Session, result: Published) -> None:
    publication = result.publication
    shown: dict[str, Json] = {
        "publication": publication.model_dump(mode="json", by_alias=True),
        "nothing_to_do": result.nothing_to_do,
        "bytes_sent": result.bytes_sent,
        "image_bytes_sent": result.sent.bytes_sent,
        "blobs": {
            "sent": result.sent.sent + result.attached.sent,
            "present": result.sent.present + result.attached.present,
            "mounted": result.sent.mounted + result.attached.mounted,
        },
        "seconds": round(result.seconds, 3),
    }
    state = "nothing to do: already published" if result.nothing_to_do else "published"
    lines = [f"{state}: {publication.tag}", f"moving tag: {publication.moving_tag}", f"oci {publication.oci_digest}"]
    if publication.docker_digest:
        lines.append(f"docker {publication.docker_digest}")
    if publication.sqsh:
        lines.append(f".sqsh {publication.sqsh.digest}")
    if not result.nothing_to_do:
        lines.append(f"sent {result.bytes_sent} bytes in {result.seconds:.1f} s")
    session.done(shown, *lines)


def _print_base(session: Session, result: PublishedBase) -> None:
    state = "nothing to do: already published" if result.nothing_to_do else "published"
    shown: dict[str, Json] = {
        "digest": result.digest,
        "tag": result.tag,
        "nothing_to_do": result.nothing_to_do,
        "bytes_sent": result.sent.bytes_sent,
    }
    session.done(shown, f"{state}: {result.tag}", f"oci {result.digest}")


def _print_revoked(session: Session, result: Revoked, elsewhere: Sequence[str]) -> None:
    state = "nothing to do: already revoked" if result.nothing_to_do else "revoked"
    heads: dict[str, Json] = {tag: head.tag if head else None for tag, head in result.heads.items()}
    session.done(
        {
            "nothing_to_do": result.nothing_to_do,
            "publications": [item.model_dump(mode="json", by_alias=True) for item in result.publications],
            "moving_tags": heads,
            "elsewhere": [*elsewhere],
        },
        *(f"{state}: {item.tag}" for item in result.publications),
        *(f"{tag} names {name}" if name else f"{tag} names nothing: all was revoked" for tag, name in heads.items()),
        *(f"another repository has it, too: {line}" for line in elsewhere),
    )
