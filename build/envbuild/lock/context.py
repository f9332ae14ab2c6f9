"""Where a lock is worked out: a folder that goes at the end, and what everything there needs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.catalog.site import Site
from envbuild.core.progress import Reporter
from envbuild.store.local import LocalStore


@dataclass(frozen=True, kw_only=True)
class LockContext:
    """Where planning works: a folder for throw-away projects, its log, the site and the store.

    Attributes:
        ending: what is to be ended before the folder goes.
    """

    folder: Path
    log: Path
    site: Site
    store: LocalStore
    reporter: Reporter
    ending: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
