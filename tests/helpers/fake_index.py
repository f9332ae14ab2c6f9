"""A package index that is a dictionary of releases, in the order from the oldest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helpers.locks import resolved_package
from packaging.specifiers import SpecifierSet

from envbuild.core.errors import ResolutionError
from envbuild.lock.uv.package_index import PackageIndex
from envbuild.lock.uv_lock import Packages


@dataclass(frozen=True, kw_only=True)
class FakeIndex(PackageIndex):
    """Answers as uv does: with the newest release, the lowest one where that is set, or the preferred one."""

    releases: Mapping[str, Sequence[str]]

    def find(self, packages: Mapping[str, str], what: str, *, preferred: Mapping[str, str] | None = None) -> Packages:
        releases = {}
        for name, specifier in packages.items():
            fitting = list(SpecifierSet(specifier).filter(self.releases[name]))
            if not fitting:
                raise ResolutionError(f"cannot {what}", why="", fix="")
            wanted = (preferred or {}).get(name)
            newest = fitting[0 if self.settings.get("resolution") == "lowest" else -1]
            releases[name] = resolved_package({"name": name, "version": wanted if wanted in fitting else newest})
        return releases


def fake_index(base: Any, context: Any, **releases: Sequence[str]) -> FakeIndex:
    """An index with these releases; in names, ``_`` stands for ``-``."""
    by_name = {name.replace("_", "-"): given for name, given in releases.items()}
    return FakeIndex(base=base, context=context, releases=by_name)
