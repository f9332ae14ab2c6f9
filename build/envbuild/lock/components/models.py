"""What is decided of a stack's components, as frozen types."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from packaging.specifiers import SpecifierSet

from envbuild.catalog.base import Base
from envbuild.catalog.stack import Component, Phase
from envbuild.core.errors import EnvbuildError
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
        name: in the normal form of PEP 503, as the stack's file has it.
        asked: what was asked for, in the user's or the stack's words.
        specifier: the releases that may be taken; empty for any, and for a commit.
        git: the repository of the commit; empty where there is none.
        because: where the decision comes from, for people: "pin", "requirements/manifest.json of nemo-toolkit 8cfedd7".
        subdirectory: the folder of the repository that holds the package; empty for its top.
        url: the file that is taken instead of a release or a commit.
        index: the index that its releases are taken from, by name; empty for the site's own.
        held_by: the components whose declarations led to it, where these decide.
        overrides: upstream puts it over what packages declare of it.
        version: the release of the specifier that is taken, where it is one with those of other packages.
        pinned_by: the component whose upstream pins this very commit.
        release_of: the repository and the commit that upstream pins, where a release is taken in its place.
    """

    name: str
    spec: Component
    asked: str
    origin: DecidedBy
    because: str
    specifier: str = ""
    git: str = ""
    commit: Commit | None = None
    subdirectory: str = ""
    url: str = ""
    index: str = ""
    held_by: tuple[str, ...] = ()
    overrides: bool = False
    version: str = ""
    pinned_by: str = ""
    release_of: tuple[str, Commit] | None = None

    @property
    def range(self) -> SpecifierSet:
        """The releases that may be taken, pre-releases too."""
        # Upstream pins pre-releases (nvidia-modelopt==0.44.0rc5), which a specifier leaves out by default (PEP 440).
        return SpecifierSet(self.specifier, prereleases=True)

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
            return f"=={self.version}" if self.version else self.specifier
        # A direct reference (PEP 508); the fragment is pip's, and uv reads it too.
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

    @property
    def title(self) -> str:
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
    specifier: str = ""
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
        return f"{companion.where} {word} {self.chosen.title}"


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
class Preference:
    """A version that is taken where everything accepts it, and where nothing decides another.

    Attributes:
        because: where it comes from, for people: ``uv.lock of megatron-bridge dedc564c1bda``.
        by: the component in whose tree it is.
    """

    version: str
    because: str
    by: str = ""


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
    """What one package declares, as it was read without a build.

    Attributes:
        version: of which it is known; empty: it is taken to hold for all.
        sdist_digest: of the sdist that says so; empty for a commit.
        requires_python: the Pythons that it is for; empty for all.
        requires_dist: its requirements, as PEP 508 lines.
        build_requires: what must be installed before it is built without isolation.
        rewritten: requirements that named another CUDA than the base's, as ``old -> new``.
    """

    name: str
    version: str
    requires_dist: tuple[str, ...]
    sdist_digest: str = ""
    requires_python: str = ""
    provides_extra: tuple[str, ...] = ()
    build_requires: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()


# Besides the names of extras: what a component needs without any, what builds it, what only a build would tell, and
# what the lock's project requires itself, whoever else does.
ALWAYS, BUILD, ANY, PROJECT = "", "[build]", "[any]", "[project]"


@dataclass(frozen=True, kw_only=True)
class GitSource:
    """A package that another one takes from git or from an address.

    Attributes:
        chosen: which commit or file it is, and who said so.
        by: the package whose pyproject.toml says so.
        parts: for which parts of ``by``: its extras, ALWAYS, BUILD, ANY, PROJECT.
        required: it is asked for whatever else the lock holds.
        build_requires: what must be installed to build it without isolation, as PEP 508 lines.
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
        """What two of them are the same by: the commit and folder, or the address, or the index and the releases."""
        component = self.chosen
        return (
            component.commit.sha if component.commit else component.url or component.specifier,
            component.index or component.subdirectory,
        )

    def text(self) -> str:
        """One line for people."""
        commit = f" ({self.chosen.commit.sha[:12]})" if self.chosen.commit else ""
        return f"{self.name} {self.chosen.asked}{commit}: {self.chosen.because}"


@dataclass(frozen=True, kw_only=True)
class MissingSource:
    """A package that another one takes from a place where it cannot be had.

    Attributes:
        by: the package whose pyproject.toml says so, and for which parts of it, as of a :class:`GitSource`.
        place: what of which repository, for people.
        error: why it cannot be had.
        barred: the site's own index is not asked for it.
    """

    name: str
    by: Chosen
    parts: frozenset[str]
    place: str
    error: EnvbuildError
    barred: bool = False


@dataclass(frozen=True, kw_only=True)
class GitSources:
    """All that may be taken so; of several for one package the first is in force.

    Attributes:
        missing: what cannot be had; it matters where something asks for it.
        overruled: sources of which the stack or the user says something else, for people, by package.
        indexes: the index of components of the stack that another one takes from an index of its own, by package.
    """

    candidates: tuple[GitSource, ...] = ()
    missing: tuple[MissingSource, ...] = ()
    overruled: Mapping[str, str] = field(default_factory=dict)
    indexes: Mapping[str, str] = field(default_factory=dict)

    @property
    def barred(self) -> list[str]:
        """The packages that no release may be taken of: their index is not configured, and another is not meant."""
        return sorted({source.name for source in self.missing if source.barred} - self.in_force.keys())

    @property
    def in_force(self) -> dict[str, GitSource]:
        """The one that holds, by package."""
        by_name: dict[str, GitSource] = {}
        for source in self.candidates:
            by_name.setdefault(source.name, source)
        return by_name

    def only(self, names: Collection[str]) -> GitSources:
        """Nothing but these packages."""
        return replace(self, candidates=tuple(source for source in self.candidates if source.name in names))

    def without(self, gone: Collection[str]) -> GitSources:
        """Without what these components take, and what that takes in turn; an index of its own stays a package's."""
        left = tuple(source for source in self.candidates if source.by.name not in gone or source.chosen.index)
        if len(left) == len(self.candidates):
            return self
        kept = {source.name for source in left}
        return replace(self, candidates=left).without({source.name for source in self.candidates} - kept)
