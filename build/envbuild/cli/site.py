"""``envbuild report --html``: the site of the ledger. (``cli/report.py`` prints failures.)"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from envbuild.cli.common import FOLDER, Session, as_command
from envbuild.cli.ledger import opened_ledger, state_place
from envbuild.cli.options import option
from envbuild.cli.status import limit_of, max_age
from envbuild.core.text import shown
from envbuild.nightly.site.site import write_site


@dataclass(frozen=True, kw_only=True)
class Options:
    html: Path = option("--html DIR", "Write the site to this folder.", required=True, type=FOLDER)
    max_age_days: float | None = max_age()
    state: str | None = state_place()


@as_command("report", Options)
def command(session: Session, options: Options) -> None:
    """Write a static site: the certified image of each target, how to pull it, and the result of every nightly run.

    The pages need no server and no JavaScript. An existing site is replaced.
    """
    context = session.context
    with opened_ledger(session, options.state) as ledger, context.reporter.step("write the site"):
        done = write_site(ledger, options.html, context.clock(), limit_of(session, options.max_age_days))
    session.done(
        {"index": str(done.index), "pages": done.pages, "nights": done.nights, "locks": done.locks},
        f"{done.pages} pages: {done.nights} nights, {done.locks} locks",
        shown(done.index),
    )
