"""``envbuild gc``."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.cli.common import Session, as_command, out_dir
from envbuild.cli.ledger import opened_ledger, shared_state, state_place
from envbuild.cli.options import flag, option
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


@dataclass(frozen=True, kw_only=True)
class Options:
    repositories: tuple[str, ...] = option(
        "--from REGISTRY/REPO", "Also clean this repository; may be repeated.", multiple=True
    )
    stores: tuple[str, ...] = option(
        "--sqsh-from PLACE", "Also clean this .sqsh store: s3://, gs:// or DIR.", multiple=True
    )
    nights: int = option(
        "--nights N", "Keep what the last N nightly runs of a stack used.", type=click.IntRange(min=1), default=14
    )
    dry_run: bool = flag("--dry-run", "Print what would be removed, and remove nothing.")
    state: str | None = state_place()
    out_dir: Path = out_dir()


@as_command("gc", Options)
def command(session: Session, options: Options) -> None:
    """Remove images that no tag, lock or recent nightly run needs.

    They are removed from this machine's store, and from each --from and --sqsh-from.

    What is attached to a kept image is kept. Revoked publications stay, so that pulling one prints the reason.
    """
    removed: list[Json] = []
    lines: list[str] = []
    reasons: dict[str, Json] = {}
    dry_run = options.dry_run
    # A dry run writes nothing, so it has no lease.
    shared = None if dry_run else shared_state(session, options.state)
    with contextlib.ExitStack() as stack, opened_ledger(session, options.state) as ledger:
        for name in sorted({night.stack for night in ledger.rows(NightRow)}):
            # A night that goes on may use what it has not recorded yet.
            stack.enter_context(only_night(name, session.site.state_dir, session.context))
            if shared is not None:
                stack.enter_context(Lease(shared, name, session.context).held())
        kept = what_stays(ledger, session.project, options.out_dir, options.nights)
        for place in (*options.repositories, *options.stores):
            is_store = place in options.stores
            planned, going = _swept(place, is_store, kept, session, dry_run=dry_run)
            reasons[place] = {**planned.kept}
            lines += [f"kept: {place}:{tag}: {why}" for tag, why in planned.kept.items()]
            for publication in going:
                removed.append({"repository": place, "tag": publication.tag, "digest": publication.oci_digest})
                lines.append(f"{place}:{publication.tag}  {_size(publication, is_store) / 1e6:.0f} MB")
            for publication in planned.damaged:
                session.reporter.note(f"note: {place}:{publication.tag} {LOST}")
        images = stored_images(session.store)
        old = unneeded_entries(session.store, kept)
        gone = old if dry_run else remove(session.store, old)
    removed += [{"kind": entry.kind, "key": entry.key, "bytes": entry.size_bytes} for entry in gone]
    lines += [f"{entry.name}  {entry.size_bytes / 1e6:.0f} MB" for entry in gone]
    stay = images - sum(entry.kind == IMAGES for entry in gone)
    lines.append(
        f"images in the store: {images}, of which {stay} stay: needed by {len(kept.locks)} locks and "
        f"{len(kept.images)} images of tags, nights and {shown(options.out_dir)}, or used within a day"
    )
    by_name: dict[str, Json] = {
        "removed": removed,
        "dry_run": dry_run,
        "kept": reasons,
        "store": {"images": images, "kept": stay},
    }
    session.done(by_name, *lines, f"{len(removed)} {'would be removed' if dry_run else 'removed'}")


def _swept(
    place: str, is_store: bool, needs: Needs, session: Session, *, dry_run: bool
) -> tuple[Sweep, tuple[Publication, ...]]:
    """Plan the removal in one place, and remove unless it is a dry run; returns the plan and what goes."""
    if is_store:
        store = open_sqsh_store(place, session.site)
        planned = plan_store_sweep(store, needs, session.context.clock())
        return planned, planned.going if dry_run else sweep_store(store, planned.going)
    registry = open_repository(place, session.site)
    planned = plan_sweep(registry, needs)
    if not dry_run:
        sweep(registry, planned)
    return planned, planned.going


def _size(publication: Publication, is_store: bool) -> int:
    return publication.sqsh.size_bytes if is_store and publication.sqsh else publication.size_bytes
