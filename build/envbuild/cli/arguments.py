"""Moments, ages and digests on the command line."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from envbuild.catalog.fields import moment_of
from envbuild.core.digests import is_digest

UNITS = {"h": 1, "d": 24, "w": 7 * 24}


def parse_moment(text: str) -> datetime:
    """``2026-01-31T23:59:59Z``."""
    try:
        return moment_of(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a moment such as 2026-01-31T23:59:59Z (UTC)") from None


def parse_age(text: str) -> timedelta:
    """``12h``, ``30d`` or ``4w``."""
    # Five digits of weeks are 1900 years; six would lead to before the year 1.
    if not (match := re.fullmatch(r"(\d{1,5})([hdw])", text)):
        raise ValueError(f"{text!r} is not an age such as 12h, 30d or 4w")
    return timedelta(hours=int(match[1]) * UNITS[match[2]])


def parse_digest(text: str) -> str:
    """``sha256:`` and 64 hex digits."""
    if not is_digest(text):
        raise ValueError(f"{text!r} is not a digest (sha256: and 64 hex digits)")
    return text
