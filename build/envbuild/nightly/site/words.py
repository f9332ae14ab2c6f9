"""Numbers and moments as the pages write them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from envbuild.catalog.fields import moment_of
from envbuild.core.digests import sha256_bytes

_HTTPS = re.compile(r"https://[A-Za-z0-9.-]+(:\d+)?/[A-Za-z0-9._~/-]+")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def age(since: datetime, at: datetime) -> str:
    """``5 hours``, ``1 day``, ``12 days``."""
    hours = max(0, int((at - since) / timedelta(hours=1)))
    if hours < 48:
        return f"{hours} hour{'' if hours == 1 else 's'}"
    return f"{hours // 24} days"


def moment_text(moment: str | datetime | None) -> str:
    """``2026-11-21 04:12 UTC``; empty for none."""
    if moment is None or moment == "":
        return ""
    return f"{moment_of(moment) if isinstance(moment, str) else moment:%Y-%m-%d %H:%M UTC}"


def size(count: float) -> str:
    """``812 kB``, ``3.1 GB``; powers of 1000, as registries count."""
    for unit in ("B", "kB", "MB", "GB"):
        # What would be rounded to 1000 has the next unit.
        if count < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if count >= 99.5 or unit == "B" else f"{count:.2g} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """``4.2 s``, ``3 min 20 s``, ``1 h 05 min``."""
    # What would be rounded to 60.0 s is a minute.
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min"


def file_name(key: str) -> str:
    """A file's name for a key; one that comes from elsewhere may hold anything."""
    plain = key.removeprefix("sha256:")
    return plain if _FILE.fullmatch(plain) and ".." not in plain else sha256_bytes(key.encode())[7:39]


def commit_link(git: str | None, commit: str | None) -> str:
    """The page of a commit, where a repository has pages as GitHub and GitLab have them; else empty."""
    address = (git or "").removesuffix(".git").rstrip("/")
    if not commit or not _HTTPS.fullmatch(address) or not re.fullmatch(r"[0-9a-f]{40}", commit):
        return ""
    return f"{address}/commit/{commit}"
