"""``envbuild publish``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.catalog.catalog import Selection
from envbuild.certify.certificate.statement import CERTIFICATE_FILE
from envbuild.cli.arguments import parse_digest
from envbuild.cli.command import given_options
from envbuild.cli.common import ANY_PATH, LockedOptions, Session, as_command, out_dir
from envbuild.cli.options import flag, include, no_effect, option
from envbuild.cli.publishing import SqshOptions, policy_name
from envbuild.cli.signing import KeyOptions, signer_of, trust_file, trust_of
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

# All that goes with --revoke; with BASE alone the base itself is published.
REVOKING = {"to", "revoke", "reason", "sqsh_to", "as_json", "quiet"}
BASE = {"base", "to", "as_json", "quiet"}


@dataclass(frozen=True, kw_only=True)
class Options:
    locked: LockedOptions = include(LockedOptions)
    to: str = option("--to REGISTRY/REPO", "The repository that gets the image.", required=True)
    sqsh: SqshOptions = include(SqshOptions)
    tag: str | None = option("--tag NAME", "The moving tag; default: LOCK[-BRANCH][-BASE]-TARGET.")
    policy: str = policy_name()
    certificate: Path | None = option(
        "--certificate FILE", "The certificate; default: the image's newest in --out-dir.", type=ANY_PATH
    )
    trust: Path | None = trust_file()
    uncertified: bool = flag(
        "--uncertified", "Publish without a certificate, under tags that begin with `uncertified-`."
    )
    allow_dirty: bool = flag(
        "--allow-dirty", "Publish a uv project whose files were not all as in its commit when it was locked."
    )
    docker_manifest: bool = flag(
        "--docker-manifest", "Also push a Docker manifest where the registry does not need one."
    )
    mount_from: tuple[str, ...] = option(
        "--mount-from REPO", "Reuse the layers of REPO, a repository of the same registry.", multiple=True
    )
    revoke: str | None = option("--revoke DIGEST", "Revoke the publications of this digest.", convert=parse_digest)
    reason: str | None = option("--reason TEXT", "With --revoke: the reason.")
    keys: KeyOptions = include(KeyOptions)
    out_dir: Path = out_dir()


@as_command("publish", Options)
def command(session: Session, options: Options) -> None:
    """Publish a certified image to a registry, with its certificate, SBOMs and .sqsh attached.

    The policy must accept the certificate, else exit code 9. The immutable tag names this lock and target; the moving
    tag is updated last.

    With only --base and --to, publish the base itself, so that others can build the same image on it.
    """
    context = click.get_current_context()
    if options.revoke is not None:
        _refuse_other_options(context)
        _revoke(session, options, options.revoke)
        return
    options.sqsh.check()
    if options.reason is not None:
        raise no_effect("--reason", "without --revoke", "It states why a publication is revoked.")
    base = options.locked.selection.base
    if base is not None and given_options(context) <= BASE:
        # A base is made without a stack or a target.
        alone = Selection(session.catalog, stack_name="", base_name=base, target_name="")
        _print_base(session, publish_base(alone, options.to, session.context))
        return
    done = publish(_request(session, options), session.context)
    _keep(session, options.to, [done.publication])
    _print(session, done)


def _revoke(session: Session, options: Options, digest: str) -> None:
    reason = options.reason or ""
    if not reason.strip():
        raise UsageError(
            "--revoke needs --reason TEXT",
            why="It is shown to everyone who asks for the revoked image.",
            fix="Write why, in one sentence.",
        )
    revoked = revoke(options.to, digest, reason, session.context, sqsh_to=options.sqsh.sqsh_to)
    _keep(session, options.to, revoked.publications)
    _print_revoked(session, revoked, _commands_elsewhere(session, options.to, revoked.publications, reason))


def _request(session: Session, options: Options) -> PublishRequest:
    selection = session.select_locked(options.locked)
    names = (selection.stack_name, selection.base_name, selection.target_name)
    image = find_image(options.out_dir, *names, options.locked.name)
    return PublishRequest(
        image=image,
        lock=find_lock(session.project, selection, options.locked.name),
        selection=selection,
        to=options.to,
        certificate=options.certificate or newest_certificate(options.out_dir, image),
        policy=session.catalog.policy(options.policy),
        trust=trust_of(session, options.trust),
        uncertified=options.uncertified,
        allow_dirty=options.allow_dirty,
        moving_tag=options.tag,
        sqsh=not options.sqsh.no_sqsh,
        sqsh_to=options.sqsh.sqsh_to,
        mount_from=options.mount_from,
        docker_manifest=options.docker_manifest,
        signer=signer_of(session, options.keys),
    )


def _keep(session: Session, to: str, publications: Sequence[Publication]) -> None:
    """Write publications into the ledger; what is published stays published where that fails."""
    from envbuild.ledger.ledger import Ledger
    from envbuild.nightly.published import repository_name
    from envbuild.nightly.records import publication_row

    try:
        with Ledger.open(session.ledger_file) as ledger:
            ledger.record(*[publication_row(publication, repository_name(to)) for publication in publications])
    except EnvbuildError as error:
        session.reporter.note(f"note: the ledger was not written: {error.what}. {error.why}")


def _commands_elsewhere(session: Session, to: str, publications: Sequence[Publication], reason: str) -> list[str]:
    """The commands that revoke the images in other repositories of the ledger; none if it cannot be read."""
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
    certificates = (out_dir / "certificates" / image.name).glob(f"*/{CERTIFICATE_FILE}")
    return max(certificates, key=lambda path: path.stat().st_mtime_ns, default=None)


def _refuse_other_options(context: click.Context) -> None:
    if others := given_options(context) - REVOKING:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(others))
        raise no_effect(flags, "with --revoke", "The digest names what is revoked.")


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
            "publications": [publication.model_dump(mode="json", by_alias=True) for publication in result.publications],
            "moving_tags": heads,
            "elsewhere": [*elsewhere],
        },
        *(f"{state}: {publication.tag}" for publication in result.publications),
        *(f"{tag} names {name}" if name else f"{tag} names nothing: all was revoked" for tag, name in heads.items()),
        *(f"another repository has it, too: {line}" for line in elsewhere),
    )
