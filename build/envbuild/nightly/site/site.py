"""Writes the site of a ledger into a folder, all of it or nothing."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from envbuild.core import jsonread
from envbuild.core.errors import UsageError
from envbuild.core.files import machine_errors, refuse_unwritable, remove_tree, replace_tree
from envbuild.ledger.ledger import Ledger
from envbuild.nightly.site.pages import INDEX, RECORD, RECORD_SCHEMA, LedgerPages
from envbuild.nightly.site.snapshot import LedgerSnapshot
from envbuild.nightly.state import states


@dataclass(frozen=True, kw_only=True)
class WrittenSite:
    """The place of a written site, and the numbers of its pages, nights and locks."""

    index: Path
    pages: int
    nights: int
    locks: int


def write_site(ledger: Ledger, into: Path, at: datetime, max_age_days: float) -> WrittenSite:
    """Write the site; an older one in that folder is replaced as a whole.

    Args:
        at: the moment that ages are counted to.
        max_age_days: a certified image that is older is stale.

    Raises:
        UsageError: the folder holds something else.
    """
    into = into.absolute()
    _refuse_other(into)
    refuse_unwritable(into)
    snapshot = LedgerSnapshot.read(ledger)
    site = LedgerPages(snapshot, states(ledger, at, max_age_days), at)
    with machine_errors(into):
        into.parent.mkdir(parents=True, exist_ok=True)
        # Next to it: a rename does not lead from one disk to another.
        staged = Path(tempfile.mkdtemp(dir=into.parent, prefix=f".{into.name}.new."))
    count = 0
    try:
        with machine_errors(into):
            for name, content in site.pages():
                path = staged / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
                count += name.endswith(".html")
            # mkdtemp makes it for its owner alone; a web server reads as another account.
            staged.chmod(0o755)
        replace_tree(staged, into)
    finally:
        remove_tree(staged)
    return WrittenSite(
        index=into / INDEX, pages=count, nights=len(snapshot.nights), locks=len(snapshot.locks_by_digest)
    )


def _refuse_other(into: Path) -> None:
    """Refuse a folder with anything but an older site, which goes."""
    with machine_errors(into, "read"):
        if not into.exists() or (into.is_dir() and not any(into.iterdir())):
            return
        try:
            record = jsonread.loads((into / RECORD).read_bytes())
        except (OSError, ValueError):
            record = None
    if not isinstance(record, dict) or record.get("schema") != RECORD_SCHEMA:
        raise UsageError(
            f"{into} exists and is not a site of envbuild",
            why="A site is written anew, and what is in its place would be lost.",
            fix="Name a new folder, or remove this one yourself.",
        )
