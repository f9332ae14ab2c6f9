"""As-of: nothing uploaded to the index after this moment is taken, so that a lock repeats on another day."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta, timezone
from typing import TypeAlias

from envbuild.catalog.context import Clock
from envbuild.catalog.fields import DATE, MOMENT_FORMAT
from envbuild.core.errors import UsageError
from envbuild.core.tomlread import Toml

# Up to when branches count; None: their tips.
Bound: TypeAlias = date | datetime | None
NOW = "now"
RELEASE = "release"


@dataclass(frozen=True, kw_only=True)
class AsOf:
    """What was asked for, and the moment that it means.

    Attributes:
        asked: ``now``, ``release``, a date, or a commit.
        moment: UTC, whole seconds; the first one that counts as later.
        reason: how the moment follows from what was asked, for people.
        held: packages are held to it; an index without upload times can not be.
        undated: packages of such an index, where others are held.
    """

    asked: str
    moment: datetime
    reason: str
    held: bool = True
    undated: frozenset[str] = frozenset()

    def settings(self, dates: Mapping[str, str | bool]) -> dict[str, Toml]:
        """The keys of ``[tool.uv]`` that hold packages to the moment.

        Args:
            dates: moments of their own that packages have.
        """
        if not self.held:
            return {}
        return {"exclude-newer": self.text(), "exclude-newer-package": with_undated(dates, self.undated)}

    def text(self) -> str:
        """The moment as uv and the record write it: ``2026-11-21T00:00:00Z``."""
        return timestamp(self.moment)


def with_undated(dates: Mapping[str, str | bool], undated: Collection[str]) -> dict[str, str | bool]:
    """The values of uv's ``exclude-newer-package``, for packages without upload times too."""
    return {**dates, **dict.fromkeys(sorted(undated), False)}


def timestamp(moment: datetime) -> str:
    """``2026-11-21T00:00:00Z``."""
    return moment.astimezone(timezone.utc).strftime(MOMENT_FORMAT)


def parse_date(text: str) -> date | None:
    """A date ``YYYY-MM-DD``; None when the text has another form.

    Raises:
        UsageError: it has the form, but names no day.
    """
    if re.match(DATE, text) is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"{text} is not a date", why=str(error), fix="Write a day as YYYY-MM-DD.") from error


def end_of(day: date) -> datetime:
    """The first moment after a day, UTC."""
    # uv's exclude-newer takes what was uploaded before a moment, so the end of a day is the first moment of the next.
    return datetime.combine(day + timedelta(days=1), time(), timezone.utc)


def now(clock: Clock) -> AsOf:
    """The moment of the call."""
    return AsOf(asked=NOW, moment=clock().replace(microsecond=0), reason="the moment of locking")


def not_held(clock: Clock) -> AsOf:
    """The moment of the call, to which no package is held."""
    return replace(
        now(clock), reason="the moment of locking; packages are not held to it (no upload times)", held=False
    )


def on_day(day: date, clock: Clock) -> AsOf:
    """The end of a day.

    Raises:
        UsageError: the day is not over.
    """
    if end_of(day) > clock():
        raise UsageError(
            f"--as-of {day.isoformat()} is not over yet",
            why="What comes out until then would change the lock, without a notice.",
            fix="Name a day that is over (UTC), or 'now'.",
        )
    return AsOf(asked=day.isoformat(), moment=end_of(day), reason=f"the end of {day.isoformat()}, UTC")


def after_release(anchor: str, released_at: datetime, margin: timedelta, clock: Clock) -> AsOf:
    """The anchor's own moment and a margin, in which what belongs to it may have come out."""
    moment = released_at.astimezone(timezone.utc).replace(microsecond=0) + margin
    today = clock().replace(microsecond=0)
    if moment > today:
        # A moment to come would let the same inputs resolve differently tomorrow.
        reason = f"{anchor} is of {timestamp(released_at)}; its {margin.days} days of margin are not over yet"
        return AsOf(asked=RELEASE, moment=today, reason=reason)
    reason = f"{anchor} is of {timestamp(released_at)}, and {margin.days} days of margin"
    return AsOf(asked=RELEASE, moment=moment, reason=reason)
