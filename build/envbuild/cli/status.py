"""``envbuild status``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from envbuild.cli.common import Session, as_command
from envbuild.cli.ledger import opened_ledger, state_place
from envbuild.cli.options import option
from envbuild.core.errors import StaleImageError


def max_age() -> Any:
    return option(
        "--max-age DAYS", "From this age an image is stale; default: the policy's limit.", type=click.FloatRange(min=0)
    )


def limit_of(session: Session, days: float | None) -> float:
    """After how many days an image is stale."""
    return session.catalog.policy("default").max_age_days if days is None else days


@dataclass(frozen=True, kw_only=True)
class Options:
    stack: str | None = option("--stack NAME", "Only this stack.")
    max_age_days: float | None = max_age()
    state: str | None = state_place()


@as_command("status", Options)
def command(session: Session, options: Options) -> None:
    """Print the newest certified image of each stack and target, its age, and why there is no newer one.

    The exit code is 14 if an image is older than the policy allows.
    """
    from envbuild.nightly.state import states

    limit = limit_of(session, options.max_age_days)
    with opened_ledger(session, options.state) as ledger:
        targets = states(ledger, session.context.clock(), limit, options.stack)
    failed = {row.stack: row.failed_lock for row in targets if row.failed_lock is not None}
    lines = [line for row in targets for line in (row.line(), *([f"  {row.pull_command}"] if row.image else []))]
    lines += [f"{name}: no new lock since {lock.since[:10]}: {lock.what}" for name, lock in failed.items()]
    session.done(
        {"targets": [row.as_json() for row in targets], "max_age_days": limit},
        *(lines or ["the ledger has no night and no publication: envbuild nightly, or envbuild ledger rebuild"]),
    )
    if any(row.state == "stale" for row in targets):
        raise click.exceptions.Exit(StaleImageError.exit_code)
