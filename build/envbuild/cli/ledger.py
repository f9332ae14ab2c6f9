"""``envbuild ledger export|rebuild``, and how commands open the ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envbuild.cli.common import Session, as_command, command_group
from envbuild.cli.options import option
from envbuild.core.text import shown

if TYPE_CHECKING:
    from envbuild.ledger.ledger import Ledger
    from envbuild.ledger.remote import SharedState


def state_place() -> Any:
    return option("--state PLACE", "The shared ledger: oci://, s3://, gs:// or a directory.")


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


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    state: str | None = state_place()


@as_command("export", ExportOptions)
def export_command(session: Session, options: ExportOptions) -> None:
    """Print the number of rows of each kind; with --json, every row."""
    with opened_ledger(session, options.state) as ledger:
        exported = ledger.export()
    counts = [f"{name}: {len(rows)}" for name, rows in exported.items() if isinstance(rows, list)]
    session.done(exported, shown(session.ledger_file), *counts, "the rows: envbuild ledger export --json")


@dataclass(frozen=True, kw_only=True)
class RebuildOptions:
    repositories: tuple[str, ...] = option(
        "--from REGISTRY/REPO",
        "The repository with the published images; may be repeated.",
        multiple=True,
        required=True,
    )
    state: str | None = state_place()


@as_command("rebuild", RebuildOptions)
def rebuild_command(session: Session, options: RebuildOptions) -> None:
    """Rebuild the ledger from published images; readable rows of the old ledger are kept.

    The old file is renamed and kept.
    """
    from envbuild.ledger.ledger import made_anew
    from envbuild.ledger.models import PublicationRow
    from envbuild.nightly.published import rebuilt_rows

    shared = shared_state(session, options.state)
    # Before the old ledger is touched.
    rows = [row for repository in options.repositories for row in rebuilt_rows(repository, session.context)]
    published = sum(isinstance(row, PublicationRow) for row in rows)
    with made_anew(session.ledger_file) as ledger:
        count = ledger.record(*rows)
        if shared is not None:
            count += shared.fetch(ledger)
    session.done(
        {"ledger": str(session.ledger_file), "published": published, "rows": count},
        f"{shown(session.ledger_file)}: {published} publications of {', '.join(options.repositories)}",
    )


command = command_group(
    "ledger", "The record of locks, images, certificates, publications and nights.", export_command, rebuild_command
)
