"""``envbuild gc``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click

from envbuild.cli.command import Command
from envbuild.cli.common import Session, out_dir_option, output_options
from envbuild.cli.ledger import opened_ledger, state_option
from envbuild.core.digests import Json
from envbuild.core.text import shown
from envbuild.image.build import KIND as IMAGES
from envbuild.ledger.models import NightRow
from envbuild.nightly.gc import stored_images, unneeded_entries, what_stays
from envbuild.nightly.lease import only_night
from envbuild.publish.collect import plan_sweep, sweep
from envbuild.publish.repository import open_repository
from envbuild.wheels.cache.prune import remove

LOST = (
    "has lost its certificate there: a retention rule may have removed what refers to it. Spare referrers, and publish "
    "the image again under another tag"
)


@click.command("gc", cls=Command)
@click.option("--from", "repositories", multiple=True, metavar="REGISTRY/REPO", help="A repository, too.")
@click.option("--nights", type=click.IntRange(min=1), default=14, show_default=True, help="The last nights that count.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@state_option
@out_dir_option
@output_options
def command(
    session: Session,
    repositories: tuple[str, ...],
    nights: int,
    dry_run: bool,
    state: str | None,
    out_dir: Path,
) -> None:
    """Remove images that no tag, no lock and none of the last nights needs: from the store, and from repositories.

    What stays keeps everything that refers to it. Revoked publications stay, so that who asks learns why.
    """
    removed: list[Json] = []
    lines: list[str] = []
    reasons: dict[str, Json] = {}
    with contextlib.ExitStack() as stack, opened_ledger(session, state) as ledger:
        for name in sorted({night.stack for night in ledger.rows(NightRow)}):
            # A night that goes on may use what it has not recorded yet.
            stack.enter_context(only_night(name, session.site.state_dir, session.context))
        kept = what_stays(ledger, session.project, out_dir, nights)
        for repository in repositories:
            registry = open_repository(repository, session.site, os.environ)
            planned = plan_sweep(registry, kept.needs())
            reasons[repository] = {**planned.kept}
            lines += [f"kept: {repository}:{tag}: {why}" for tag, why in planned.kept.items()]
            if not dry_run:
                sweep(registry, planned.going)
            for item in planned.going:
                removed.append({"repository": repository, "tag": item.tag, "digest": item.oci_digest})
                lines.append(f"{repository}:{item.tag}  {item.size_bytes / 1e6:.0f} MB")
            for item in planned.damaged:
                session.reporter.note(f"note: {repository}:{item.tag} {LOST}")
        looked = stored_images(session.store)
        old = unneeded_entries(session.store, kept)
        gone = old if dry_run else remove(session.store, old)
    removed += [{"kind": item.kind, "key": item.key, "bytes": item.size_bytes} for item in gone]
    lines += [f"{item.name}  {item.size_bytes / 1e6:.0f} MB" for item in gone]
    word = "would go" if dry_run else "removed"
    stay = looked - sum(item.kind == IMAGES for item in gone)
    lines.append(
        f"the store has {looked} images, of which {stay} stay: needed by {len(kept.locks)} locks and "
        f"{len(kept.images)} images of tags, nights and {shown(out_dir)}, or used within a day"
    )
    found: dict[str, Json] = {
        "removed": removed,
        "dry_run": dry_run,
        "kept": reasons,
        "store": {"images": looked, "kept": stay},
    }
    session.done(found, *lines, f"{len(removed)} {word}")
