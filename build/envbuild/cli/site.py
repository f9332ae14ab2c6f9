"""``envbuild report --html``: the site of the ledger. (``cli/report.py`` prints failures.)"""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.command import Command
from envbuild.cli.common import PathArgument, Session, output_options
from envbuild.cli.ledger import opened_ledger, state_option
from envbuild.core.text import shown
from envbuild.nightly.site.site import write_site


@click.command("report", cls=Command)
@click.option("--html", required=True, metavar="DIR", type=PathArgument(file_okay=False), help="Write the site there.")
@click.option("--max-age", "max_age_days", metavar="DAYS", type=click.FloatRange(min=0), help="Default: the policy's.")
@state_option
@output_options
def command(session: Session, html: Path, max_age_days: float | None, state: str | None) -> None:
    """Write a static site: which image is good for each target, how to pull it, and what every night did.

    It needs no server and no JavaScript. A site that is there is replaced as a whole.
    """
    context = session.context
    limit = session.catalog.policy("default").max_age_days if max_age_days is None else max_age_days
    with opened_ledger(session, state) as ledger, context.reporter.step("write the site"):
        done = write_site(ledger, html, context.clock(), limit)
    session.done(
        {"index": str(done.index), "pages": done.pages, "nights": done.nights, "locks": done.locks},
        f"{done.pages} pages: {done.nights} nights, {done.locks} locks",
        shown(done.index),
    )
