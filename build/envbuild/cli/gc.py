"""``envbuild gc``."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from envbuild.cli.command import Command
from envbuild.cli.common import Session, out_dir_option, output_options
from envbuild.cli.ledger import opened_ledger, shared_state, state_option
from envbuild.core.digests import Json
from envbuild.core.text import shown
from envbuild.image.build import KIND as IMAGES
from envbuild.ledger.models import NightRow
from envbuild.nightly.alone import only_night
from envbuild.nightly.gc import stored_images, unneeded_entries, what_stays
from envbuild.nightly.lease import Lease
from envbuild.publish.collect import Needs, Sweep, plan_sweep, sweep
from envbuild.publish.collect_sqsh import plan_store_sweep, sweep_store
from envbuild.publish.models import Publication
from envbuild.publish.repository import open_repository
from envbuild.publish.sqsh_stores import open_sqsh_store
from envbuild.wheels.cache.prune import remove

LOST = (
    "has lost its certificate there: a retention rule may have removed what refers to it. Spare referrers, and publish "
    "the image again under another tag"
)


@click.command("gc", cls=Command)
@click.option("--from", "repositories", multiple=True, metavar="REGISTRY/REPO", help="A repository, too.")
@click.option("--sqsh-from", "stores", multiple=True, metavar="PLACE", help="A .sqsh store (s3://, gs://, DIR), too.")
@click.option("--nights", type=click.IntRange(min=1), default=14, show_default=True, help="The last nights that count.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@state_option
@out_dir_option
@output_options
def command(
    session: Session,
    repositories: tuple[str, ...],
    stores: tuple[str, ...],
    nights: int,
    dry_run: bool,
    state: str | None,
    out_dir: Path,
) -> None:
    """Remove images that no tag, no lock and none of the last nights needs, here and where they are published.

    What stays keeps everything that refers to it. Revoked publications stay, so that who asks learns why.
    """
    removed: list[Json] = []
    lines: list[str] = []
    reasons: dict[str, Json] = {}
    # A dry run writes nothing, so it has no lease.
    shared = None if dry_run else shared_state(session, state)
    with contextlib.ExitStack() as stack, opened_ledger(session, state) as ledger:
        for name in sorted({night.stack for night in ledger.rows(NightRow)}):
            # A night that goes on may use what it has not recorded yet.
            stack.enter_context(only_night(name, session.site.state_dir, session.context))
            if shared is not None:
                stack.enter_context(Lease(shared, name, session.context).held())
        kept = what_stays(ledger, session.project, out_dir, nights)
        for place in (*repositories, *stores):
            planned, going = _swept(place, place in stores, kept, session, dry_run=dry_run)
            reasons[place] = {**planned.kept}
            lines += [f"kept: {place}:{tag}: {why}" for tag, why in planned.kept.items()]
            for item in going:
                removed.append({"repository": place, "tag": item.tag, "digest": item.oci_digest})
                lines.append(f"{place}:{item.tag}  {_size(item, place in stores) / 1e6:.0f} MB")
            for item in planned.damaged:
                session.reporter.note(f"note: {place}:{item.tag} {LOST}")
        looked = stored_images(session.store)
        old = unneeded_entries(session.store, kept)
        gone = old if dry_run else remove(session.store, old)
    removed += [{"kind": item.kind, "key": item.key, "bytes": item.size_bytes} for item in gone]
    lines += [f"{item.name}  {item.size_bytes / 1e6:.0f} MB" for item in gone]
    word = "would go" if dry_run else "removed"
    stay = looked - sum(item.kind == IMAGES for item in gone)
    lines.append(
        f"images in the store: {looked}, of which {stay} stay: needed by {len(kept.locks)} locks and "
        f"{len(kept.images)} images of tags, nights and {shown(out_dir)}, or used within a day"
    )
    by_name: dict[str, Json] = {
        "removed": removed,
        "dry_run": dry_run,
        "kept": reasons,
        "store": {"images": looked, "kept": stay},
    }
    session.done(by_name, *lines, f"{len(removed)} {word}")


def _swept(
    place: str, is_store: bool, needs: Needs, session: Session, *, dry_run: bool
) -> tuple[Sweep, tuple[Publication, ...]]:
    """What stays and could go in one place, and what went or would go."""
    if is_store:
        store = open_sqsh_store(place, session.site)
        planned = plan_store_sweep(store, needs, session.context.clock())
        return planned, planned.going if dry_run else sweep_store(store, planned.going)
    registry = open_repository(place, session.site)
    planned = plan_sweep(registry, needs)
    if not dry_run:
        sweep(registry, planned)
    return planned, planned.going


def _size(item: Publication, is_store: bool) -> int:
    return item.sqsh.size_bytes if is_store and item.sqsh else item.size_bytes
