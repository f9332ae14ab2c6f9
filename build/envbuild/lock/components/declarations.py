"""Which versions of other packages a component declares that it works with, in its metadata, for any of its extras.

What a stack asks of a component without an extra, uv does not hold to the extra's ranges: megatron-core says for its
extra ``dev`` which Transformer Engine it takes, and a stack has both without that extra.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.catalog.base import Base
from envbuild.core.errors import CheckRefusedError, ResolutionError
from envbuild.lock.components.downloads import base_tags, tags_of, wheel_metadata, wheel_name
from envbuild.lock.components.git_metadata import declared_by
from envbuild.lock.components.models import Chosen
from envbuild.lock.components.project_metadata import readable
from envbuild.lock.components.sdist_metadata import compile_metadata
from envbuild.lock.components.upstream import holds_on
from envbuild.lock.context import LockContext, Repositories, WorkContext
from envbuild.lock.uv.named_index import LookUpRules
from envbuild.lock.uv.resolution import look_up


@dataclass(frozen=True, kw_only=True)
class Range:
    """The versions of a package that another one declares.

    Attributes:
        by: who declares it, with its version or commit.
        extra: for which extra of it; empty: whatever is asked for.
        asks: the extras that it asks of the package.
    """

    by: str
    extra: str
    specifier: SpecifierSet
    asks: frozenset[str] = frozenset()

    @property
    def where(self) -> str:
        """For people: ``megatron-core 0.15.3 (extra dev)``."""
        return f"{self.by} (extra {self.extra})" if self.extra else self.by

    def has(self, version: str) -> bool:
        """Whether a version is in it."""
        # Ranges such as >=2.9.0a0,<2.10 are meant for pre-releases as well, which contains() leaves out by default.
        return self.specifier.contains(version, prereleases=True)


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a component requires: PEP 508 lines, and the names of its extras.

    Attributes:
        by: the component with its version or commit.
    """

    by: str
    lines: tuple[str, ...]
    extras: tuple[str, ...]

    def of(
        self, name: str, base: Base, *, first: Iterable[str] = (), only: Collection[str] | None = None
    ) -> list[Range]:
        """What it declares of a package on a base: a range for each extra that names it, else the one for all.

        The extras are alternatives, so each has what holds for all in it too.

        Args:
            first: extras that come before the others, which are in the order of the metadata.
            only: these extras alone; None: all of them.
        """
        lines = [line for line in readable(self.lines) if canonicalize_name(line.name) == name]
        every = list(dict.fromkeys(canonicalize_name(extra) for extra in (*first, *self.extras)))
        if only is not None:
            every = [extra for extra in every if extra in only]
        always = [line for line in lines if _holds(line, base, "")]
        listed = []
        for extra in every:
            named = [line for line in lines if line not in always and _holds(line, base, extra)]
            if named:
                listed.append(self._range(extra, [*always, *named]))
        if not listed and always and only is None:
            listed = [self._range("", always)]
        return listed

    def needed(self, base: Base, extras: Collection[str]) -> list[Requirement]:
        """What it needs on a base by itself and for these extras, all at once."""
        return [line for line in readable(self.lines) if any(_holds(line, base, extra) for extra in ("", *extras))]

    def _range(self, extra: str, lines: list[Requirement]) -> Range:
        specifier = SpecifierSet()
        for line in lines:
            specifier &= line.specifier
        asks = frozenset(canonicalize_name(item) for line in lines for item in line.extras)
        return Range(by=self.by, extra=extra, specifier=specifier, asks=asks)


def _holds(line: Requirement, base: Base, extra: str) -> bool:
    return holds_on(str(line.marker or ""), base, extra)


@dataclass(frozen=True)
class Declarations:
    """What components declare, each read once: in the metadata of a release, or in the tree at a commit.

    Attributes:
        rules: they hold the releases to the as-of moment.
    """

    base: Base
    rules: LookUpRules
    context: LockContext
    _releases: dict[tuple[str, str], Mapping[str, Any] | None] = field(default_factory=dict, init=False)
    _declared: dict[tuple[str, str], Declared | None] = field(default_factory=dict, init=False)

    def of(self, component: Chosen) -> Declared | None:
        """What a component declares; None: it is not known before a build, or there is no such release.

        Of a range of releases, the one counts that uv takes by itself.
        """
        key = (component.name, component.wanted)
        if key not in self._declared:
            with self.context.reporter.step(f"read what {component.at()} declares"):
                self._declared[key] = self._read(component)
        return self._declared[key]

    def version(self, name: str, specifier: str) -> str | None:
        """The release that uv takes by itself; None: there is none."""
        package = self._release(name, specifier)
        return None if package is None else str(package["version"])

    def _read(self, component: Chosen) -> Declared | None:
        if component.url:
            return None
        if component.commit is not None:
            return declared_at_commit(component, self.context.repositories)
        package = self._release(component.name, component.specifier)
        return None if package is None else declared_by_release(package, self.base, self.context)

    def _release(self, name: str, specifier: str) -> Mapping[str, Any] | None:
        key = (name, specifier)
        if key not in self._releases:
            try:
                tables = look_up({name: specifier}, self.base, self.rules, f"find {name} {specifier}", self.context)
                self._releases[key] = tables.get(name)
            except ResolutionError:
                self._releases[key] = None  # the resolution will say so, with all that takes part
        return self._releases[key]


def declared_at_commit(component: Chosen, repositories: Repositories) -> Declared | None:
    """What a component from git declares at its commit; None: only a build would tell."""
    found = declared_by(component, repositories)
    return None if found is None else Declared(by=component.at(), lines=tuple(found[0]), extras=tuple(found[1]))


def declared_by_release(package: Mapping[str, Any], base: Base, context: WorkContext) -> Declared | None:
    """What a release declares: a wheel of it that the base can install, else its sdist; None: only a build would tell.

    Args:
        package: its ``[[package]]`` table of a uv.lock.

    Raises:
        NetworkError: the file cannot be downloaded.
        CheckRefusedError: the wheel has another hash than the index states, or is not a wheel.
    """
    title = f"{package['name']} {package['version']}"
    wheels = package.get("wheels", [])
    if not wheels:
        try:
            (read,) = compile_metadata([package["name"]], {package["name"]: package}, None, context)
        except CheckRefusedError:
            return None
        return Declared(by=title, lines=read.requires_dist, extras=read.provides_extra)
    tags = base_tags(base)
    # Only its METADATA is read: without one for the base, the first one will do.
    file = next((wheel for wheel in wheels if tags_of(wheel_name(wheel)) & tags), wheels[0])
    from packaging.metadata import parse_email  # not needed where nothing is to be read

    raw, _ = parse_email(wheel_metadata(file, title, context))
    return Declared(by=title, lines=tuple(raw.get("requires_dist", [])), extras=tuple(raw.get("provides_extra", [])))
