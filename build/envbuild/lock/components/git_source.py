"""Packages that components from git take from git, or from an address: the types, and which of them a lock takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.core.errors import ResolutionError
from envbuild.lock.components.models import Chosen

# Besides the names of extras: what a component needs without any, what builds it, and what only a build would tell.
ALWAYS, BUILD, ANY = "", "[build]", "[any]"


@dataclass(frozen=True, kw_only=True)
class GitSource:
    """A package that another one takes from git or from an address.

    Attributes:
        chosen: which commit or file it is, and who said so.
        by: the package whose pyproject.toml says so.
        parts: for which parts of ``by``: its extras, ALWAYS, BUILD, ANY.
        required: it is asked for whatever else the lock holds.
        build_requires: what must be installed to build it, as PEP 508 lines.
    """

    chosen: Chosen
    by: Chosen
    parts: frozenset[str]
    required: bool
    build_requires: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.chosen.name

    @property
    def identity(self) -> tuple[str, str]:
        """What two of them are the same by: the commit and folder, or the address, or the releases."""
        item = self.chosen
        return (item.commit.sha if item.commit else item.url or item.specifier, item.subdirectory)

    def text(self) -> str:
        """One line for people."""
        commit = f" ({self.chosen.commit.sha[:12]})" if self.chosen.commit else ""
        return f"{self.name} {self.chosen.asked}{commit}: {self.chosen.because}"


@dataclass(frozen=True, kw_only=True)
class GitSources:
    """All that may be taken so; of several for one package the first is in force.

    Attributes:
        overruled: sources of which the stack or the user says something else, for people, by package.
    """

    candidates: tuple[GitSource, ...] = ()
    overruled: Mapping[str, str] | None = None

    @property
    def in_force(self) -> dict[str, GitSource]:
        """The one that holds, by package."""
        found: dict[str, GitSource] = {}
        for item in self.candidates:
            found.setdefault(item.name, item)
        return found

    def only(self, names: Collection[str]) -> GitSources:
        """Nothing but these packages."""
        return replace(self, candidates=tuple(item for item in self.candidates if item.name in names))

    def without(self, gone: Collection[str]) -> GitSources:
        """Without what these components take, and what that takes in turn."""
        left = tuple(item for item in self.candidates if canonicalize_name(item.by.name) not in gone)
        if len(left) == len(self.candidates):
            return self
        kept = {item.name for item in left}
        return replace(self, candidates=left).without({item.name for item in self.candidates} - kept)


def refuse_two(taken: Sequence[GitSource]) -> None:
    """Refuse two commits of one package."""
    first: dict[str, GitSource] = {}
    for item in taken:
        other = first.setdefault(item.name, item)
        if other.identity != item.identity:
            commit = other.chosen.commit
            ref = commit.sha[:12] if commit else "VERSION"
            raise ResolutionError(
                f"{other.by.at()} and {item.by.at()} take {item.name} from two places",
                why=f"{other.text()}\n{item.text()}",
                fix=f"Say which: --pin {item.name}={ref}, or pin one of the two where it agrees with the other.",
            )


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
        # Again: what was left out just now may have been all that asked for another one.
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
