"""What is decided of a stack's components, as frozen types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from envbuild.catalog.base import Base
from envbuild.catalog.stack import Component, Phase
from envbuild.git.refs import Commit


class DecidedBy(str, Enum):
    """Who decided what a component is."""

    STACK = "stack"
    PIN = "pin"
    UPSTREAM = "upstream"
    TABLE = "table"
    DECLARED = "declared"


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A component that is decided: a range of releases, or one commit.

    Attributes:
        asked: what was asked for, in the user's or the stack's words.
        specifier: the releases that may be taken; empty for any, and for a commit.
        because: where the decision comes from, for people: "pin", "requirements/manifest.json of nemo-toolkit 8cfedd7".
        subdirectory: the folder of the repository that holds the package; empty for its top.
        url: the file that is taken instead of a release or a commit.
        held_by: the components whose declarations led to it, where these decide.
    """

    name: str
    spec: Component
    asked: str
    origin: DecidedBy
    because: str
    specifier: str = ""
    git: str | None = None
    commit: Commit | None = None
    subdirectory: str = ""
    url: str = ""
    held_by: tuple[str, ...] = ()

    @property
    def is_direct(self) -> bool:
        """Whether a commit or an address says all, and no version is to be chosen."""
        return self.commit is not None or bool(self.url)

    @property
    def wanted(self) -> str:
        """What follows the name in a requirement: the specifier, or the commit or address."""
        if self.url:
            return f" @ {self.url}"
        if self.commit is None:
            return self.specifier
        return f" @ git+{self.git}@{self.commit.sha}" + (
            f"#subdirectory={self.subdirectory}" if self.subdirectory else ""
        )

    def extras(self, base: Base) -> tuple[str, ...]:
        """Its extras on a base; those that name the CUDA are left out where there is none."""
        return tuple(
            extra.replace("{cuda_major}", base.cuda_major or "")
            for extra in self.spec.extras
            if base.cuda_major is not None or "{cuda_major}" not in extra
        )

    @property
    def phase(self) -> Phase:
        return self.spec.phase

    def at(self) -> str:
        """Which one it is, for people: ``nemo-toolkit 8cfedd7d11ba``, or the release as asked for."""
        return f"{self.name} {self.commit.sha[:12] if self.commit else self.asked}"


@dataclass(frozen=True, kw_only=True)
class Companion:
    """A package that upstream pins for another: at a commit, or at versions.

    Attributes:
        where: the file that says so.
        marker: on which platforms and Pythons it does, as a PEP 508 marker; empty for all.
    """

    package: str
    where: str
    git: str | None = None
    ref: str | None = None
    specifier: str | None = None
    marker: str = ""

    @property
    def pinned(self) -> str:
        """What upstream takes of it, for people."""
        return self.ref or self.specifier or "any release"


@dataclass(frozen=True, kw_only=True)
class Lead:
    """A decided component, and what belongs to it: by its upstream's pins, or for a release by a table in envs/."""

    chosen: Chosen
    companions: Mapping[str, Companion]
    origin: DecidedBy = DecidedBy.UPSTREAM

    def because(self, companion: Companion) -> str:
        """Where the decision for a companion comes from, for people."""
        word = "for" if self.origin is DecidedBy.TABLE else "of"
        return f"{companion.where} {word} {self.chosen.at()}"


@dataclass(frozen=True, kw_only=True)
class Forced:
    """What upstream forces on a package that is not a component of the stack.

    Attributes:
        by: the component whose upstream it is.
        texts: the specifiers, each with its marker if it has one.
    """

    by: str
    where: str
    texts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Exemption:
    """A package that may be newer than the as-of moment.

    Attributes:
        until: nothing uploaded after this moment is taken of it (``2026-03-24T00:00:00Z``).
        reason: why, for people.
    """

    until: str
    reason: str

    def text(self) -> str:
        """For people and the record."""
        return f"until {self.until}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class CompileMetadata:
    """What one package of the compile phase declares.

    Attributes:
        requires_dist: its requirements, as PEP 508 lines.
        build_requires: what must be installed before it is built.
        rewritten: requirements that named another CUDA than the base's, as ``old -> new``.
    """

    name: str
    version: str
    sdist_digest: str
    requires_dist: tuple[str, ...]
    provides_extra: tuple[str, ...]
    build_requires: tuple[str, ...]
    rewritten: tuple[str, ...]
