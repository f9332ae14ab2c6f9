"""``envbuild ledger export|rebuild``, and how commands open the ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from envbuild.cli.command import Command, CommandGroup, hands_over
from envbuild.cli.common import F, Session, output_options
from envbuild.core.text import shown

if TYPE_CHECKING:
    from envbuild.ledger.ledger import Ledger
    from envbuild.ledger.remote import SharedState

STATE_HELP = "The ledger that runners share: oci://, s3://, gs:// or a directory."
state_option: Callable[[F], F] = click.option("--state", metavar="PLACE", help=STATE_HELP)


def shared_state(session: Session, place: str | None) -> SharedState | None:
    """The state that an option names; None without it."""
    if place is None:
        return None
    from envbuild.ledger.remote import SharedState

    return SharedState.open(place, session.store, session.site.ca_bundle)


@contextlib.contextmanager
def opened_ledger(session: Session, place: str | None) -> Iterator[Ledger]:
    """The ledger, to be read, with what others wrote to shared state."""
    from envbuild.ledger.ledger import Ledger

    state = shared_state(session, place)
    # Without shared state nothing is written, and a place without a ledger stays so.
    with (Ledger.read if state is None else Ledger.open)(session.ledger_file) as ledger:
        if state is not None:
            state.fetch(ledger)
        yield ledger


@click.group("ledger", cls=CommandGroup, invoke_without_command=True)
@output_options
@click.pass_context
def command(context: click.Context, session: Session) -> None:  # noqa: ARG001
    """The record of locks, images, certificates, publications and nights."""
    if not hands_over(context):
        raise click.UsageError(f"which command? There are: {', '.join(command.commands)}", context)


@command.command("export", cls=Command)
@state_option
@output_options
def export_command(session: Session, state: str | None) -> None:
    """Print the whole ledger: with --json every row, else how many of each kind."""
    with opened_ledger(session, state) as ledger:
        exported = ledger.export()
    counts = [f"{name}: {len(rows)}" for name, rows in exported.items() if isinstance(rows, list)]
    session.done(exported, shown(session.ledger_file), *counts, "the rows: envbuild ledger export --json")


@command.command("rebuild", cls=Command)
@click.option("--from", "repositories", multiple=True, required=True, metavar="REGISTRY/REPO", help="May be repeated.")
@state_option
@output_options
def rebuild_command(session: Session, repositories: tuple[str, ...], state: str | None) -> None:
    """Make the ledger anew from what is published; what can be read of the old one is kept.

    The old file stays next to the new one under another name.
    """
    from envbuild.ledger.ledger import made_anew
    from envbuild.ledger.models import PublicationRow
    from envbuild.nightly.published import rebuilt_rows

    shared = shared_state(session, state)
    # Before the old ledger is touched.
    rows = [row for repository in repositories for row in rebuilt_rows(repository, session.context)]
    published = sum(isinstance(row, PublicationRow) for row in rows)
    with made_anew(session.ledger_file) as ledger:
        count = ledger.record(*rows)
        if shared is not None:
            count += shared.fetch(ledger)
    session.done(
        {"ledger": str(session.ledger_file), "published": published, "rows": count},
        f"{shown(session.ledger_file)}: {published} publications of {', '.join(repositories)}",
    )
