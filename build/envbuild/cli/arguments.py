"""Moments, ages and digests on the command line, and options that exclude each other."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

import click

from envbuild.catalog.fields import moment_of
from envbuild.core.digests import is_digest
from envbuild.core.errors import UsageError

UNITS = {"h": 1, "d": 24, "w": 7 * 24}


def parse_moment(context: click.Context, parameter: click.Parameter, value: str | None) -> datetime:  # noqa: ARG001
    """``2026-01-31T23:59:59Z``; now where nothing is named."""
    if value is None:
        return datetime.now(timezone.utc)
    try:
        return moment_of(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a moment such as 2026-01-31T23:59:59Z (UTC)") from None


def parse_age(context: click.Context, parameter: click.Parameter, value: str | None) -> timedelta | None:  # noqa: ARG001
    """``12h``, ``30d`` or ``4w``."""
    if value is None:
        return None
    # Five digits of weeks are 1900 years; six would lead to before the year 1.
    if not (match := re.fullmatch(r"(\d{1,5})([hdw])", value)):
        raise click.BadParameter(f"{value!r} is not an age such as 12h, 30d or 4w")
    return timedelta(hours=int(match[1]) * UNITS[match[2]])


def parse_digest(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:  # noqa: ARG001
    """``sha256:`` and 64 hex digits."""
    if value is not None and not is_digest(value):
        raise click.BadParameter(f"{value!r} is not a digest (sha256: and 64 hex digits)")
    return value


def refuse_place_of_no_sqsh(no_sqsh: bool, sqsh_to: str | None) -> None:
    """Refuse a place for a .sqsh that is not published.

    Raises:
        UsageError: both options are given.
    """
    if no_sqsh and sqsh_to:
        raise UsageError(
            "--sqsh-to has no effect with --no-sqsh", why="No .sqsh is published then.", fix="Leave one of them out."
        )
