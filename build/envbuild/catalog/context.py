"""What every command and every step needs, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TypeAlias

from envbuild.catalog.site import Site
from envbuild.core.progress import Reporter
from envbuild.store.local import LocalStore

Clock: TypeAlias = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


@dataclass(frozen=True, kw_only=True)
class Context:
    """The store, the site's configuration, the reporter and the clock of one command.

    Attributes:
        clock: gives the current time, in UTC.
    """

    store: LocalStore
    site: Site
    reporter: Reporter
    clock: Clock = utc_now
