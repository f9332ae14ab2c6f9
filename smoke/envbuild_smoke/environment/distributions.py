"""The installed distributions, by the names that package indexes compare."""

import importlib.metadata
import re


def normalize(name: str) -> str:
    """Return a distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions() -> dict[str, list[importlib.metadata.Distribution]]:
    """Return the installed distributions by normalized name; the first of each, earliest on the path, is in effect."""
    by_name: dict[str, list[importlib.metadata.Distribution]] = {}
    # By a walk over sys.path and not by `importlib.metadata.version`, which sees the first copy of a package alone.
    for distribution in importlib.metadata.distributions():
        # A package that was removed halfway leaves a directory without a name.
        if name := distribution.metadata["Name"]:
            by_name.setdefault(normalize(name), []).append(distribution)
    return dict(sorted(by_name.items()))
