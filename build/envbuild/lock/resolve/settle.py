"""Which of the packages that may be taken from git a resolution really takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.lock.components.git_source import ALWAYS, ANY, BUILD, GitSource, GitSources, refuse_two


def settle(git_sources: GitSources, packages: Sequence[Mapping[str, Any]]) -> GitSources:
    """What a resolution really takes, of what might be taken.

    Args:
        packages: of uv.lock.

    Raises:
        ResolutionError: it takes a package that two of its packages want at different commits.
    """
    tables = {str(package["name"]): package for package in packages}
    takeable = git_sources.in_force.keys()
    now = git_sources
    while True:
        force = now.in_force
        asked = tuple(
            item
            for item in now.candidates
            if (item.by.name not in takeable or item.by.name in force) and _is_asked(item, force, tables)
        )
        if asked == now.candidates:
            refuse_two(asked)
            return now
        now = replace(now, candidates=asked)


def _is_asked(item: GitSource, force: Mapping[str, GitSource], tables: Mapping[str, Mapping[str, Any]]) -> bool:
    table = tables.get(canonicalize_name(item.by.name))
    other = force.get(item.by.name)
    if table is None or item.name not in tables:
        return False
    if other is not None and other.chosen.commit != item.by.commit:
        return False  # of a commit that is not in the lock
    if BUILD in item.parts:
        return True
    lists = {ALWAYS: table.get("dependencies", []), **table.get("optional-dependencies", {})}
    parts = lists if ANY in item.parts else item.parts
    return any(entry["name"] == item.name for part in parts for entry in lists.get(part, ()))
