"""``envbuild status``."""

from __future__ import annotations

import click

from envbuild.cli.command import Command
from envbuild.cli.common import Session, output_options
from envbuild.cli.ledger import opened_ledger, state_option
from envbuild.core.errors import StaleImageError


@click.command("status", cls=Command)
@click.option("--stack", metavar="NAME", help="Of this stack alone.")
@click.option("--max-age", "max_age_days", metavar="DAYS", type=click.FloatRange(min=0), help="Default: the policy's.")
@state_option
@output_options
def command(session: Session, stack: str | None, max_age_days: float | None, state: str | None) -> None:
    """Print the newest certified image of each stack and target, its age, and what keeps a newer one away.

    The exit code is 14 where an image is older than the policy allows.
    """
    from envbuild.nightly.state import states

    limit = session.catalog.policy("default").max_age_days if max_age_days is None else max_age_days
    with opened_ledger(session, state) as ledger:
        found = states(ledger, session.context.clock(), limit, stack)
    failed = {row.stack: row.failed_lock for row in found if row.failed_lock is not None}
    lines = [line for row in found for line in (row.line(), *([f"  {row.pull_command}"] if row.image else []))]
    lines += [f"{name}: no new lock since {lock.since[:10]}: {lock.what}" for name, lock in failed.items()]
    session.done(
        {"targets": [row.as_json() for row in found], "max_age_days": limit},
        *(lines or ["the ledger has no night and no publication: envbuild nightly, or envbuild ledger rebuild"]),
    )
    if any(row.state == "stale" for row in found):
        raise click.exceptions.Exit(StaleImageError.exit_code)
