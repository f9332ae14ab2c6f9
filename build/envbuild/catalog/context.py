"""What every command and every step needs, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TypeAlias

from envbuild.catalog.fields import MOMENT_FORMAT
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

    def moment(self) -> str:
        """The current time as files have it: ``2026-01-31T23:59:59Z``."""
        return self.clock().strftime(MOMENT_FORMAT)
