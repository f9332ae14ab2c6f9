"""Where a lock is worked out: a folder that goes at the end, and what everything there needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.site import Site
from envbuild.core.progress import Reporter
from envbuild.store.local import LocalStore


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """Where planning works: a folder for throw-away projects, its log, the site and the store."""

    folder: Path
    log: Path
    site: Site
    store: LocalStore
    reporter: Reporter
