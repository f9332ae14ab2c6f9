"""Which versions of other packages a component declares that it works with, in its metadata, for any of its extras.

What a stack asks of a component without an extra, uv does not hold to the extra's ranges: megatron-core says for its
extra ``dev`` which Transformer Engine it takes, and a stack has both without that extra.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.catalog.base import Base
from envbuild.core.errors import CheckRefusedError
from envbuild.lock.components.downloads import base_tags, tags_of, wheel_metadata
from envbuild.lock.components.git_metadata import declared_by, setup_names
from envbuild.lock.components.models import Chosen
from envbuild.lock.components.project_metadata import readable
from envbuild.lock.components.sdist_metadata import compile_metadata
from envbuild.lock.components.tree import tree_of
from envbuild.lock.components.upstream import holds_on
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.uv.package_index import PackageIndex
from envbuild.lock.uv_lock import ResolvedPackage


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

    def ranges(
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
        asks = frozenset(canonicalize_name(extra_of_it) for line in lines for extra_of_it in line.extras)
        return Range(by=self.by, extra=extra, specifier=specifier, asks=asks)


def _holds(line: Requirement, base: Base, extra: str) -> bool:
    return holds_on(str(line.marker or ""), base, extra)


@dataclass(frozen=True)
class Declarations:
    """What components declare, each read once: in the metadata of a release, or in the tree at a commit.

    Attributes:
        index: asked for releases as of the lock's moment.
    """

    index: PackageIndex
    _declared: dict[tuple[str, str], Declared | None] = field(default_factory=dict, init=False)

    def declared(self, component: Chosen) -> Declared | None:
        """What a component declares; None: it is not known before a build, or there is no such release.

        Of a range of releases, the one counts that uv takes by itself.
        """
        key = (component.name, component.wanted)
        if key not in self._declared:
            with self.index.context.reporter.step(f"read what {component.title} declares"):
                self._declared[key] = self._read(component)
        return self._declared[key]

    def _read(self, component: Chosen) -> Declared | None:
        if component.url:
            return None
        context = self.index.context
        if component.commit is not None:
            return declared_at_commit(component, context.repositories)
        package = self.index.release(component.name, component.specifier)
        return None if package is None else declared_by_release(package, self.index.base, context)

    def with_former_extras(self, chosen: Mapping[str, Chosen]) -> dict[str, Chosen]:
        """The components, with the former name of each extra that their trees or releases have under that one.

        uv only warns of an extra that does not exist, and nothing of what it stands for is locked then.
        """
        return {
            name: self._with_former_extras(component) if component.spec.former_extras else component
            for name, component in chosen.items()
        }

    def _with_former_extras(self, component: Chosen) -> Chosen:
        # uv's maintainers keep it a warning: another release may have the extra (astral-sh/uv#2828, #10790).
        former = {
            extra: older
            for extra, older in component.spec.former_extras.items()
            if extra in component.spec.extras and not self._has_extra(component, extra)
        }
        # NeMo has the extra llm since 2025-03-12: asked of its main of 03-01, it gave 163 packages without lightning.
        if not former:
            return component
        extras = tuple(former.get(extra, extra) for extra in component.spec.extras)
        note = ", ".join(f"extra {older}, which {extra} was before" for extra, older in former.items())
        spec = component.spec.model_copy(update={"extras": extras})
        return replace(component, spec=spec, because=f"{component.because}; {note}")

    def _has_extra(self, component: Chosen, extra: str) -> bool:
        declared = self.declared(component)
        if declared is not None:
            return canonicalize_name(extra) in map(canonicalize_name, declared.extras)
        # A setup.py that computes its extras; what only a build would tell is left to the build.
        tree = tree_of(component, self.index.context.repositories)
        return tree is None or setup_names(extra, tree)


def declared_at_commit(component: Chosen, repositories: Repositories) -> Declared | None:
    """What a component from git declares at its commit; None: only a build would tell."""
    tree = tree_of(component, repositories)
    stated = declared_by(tree) if tree is not None else None
    return Declared(by=component.title, lines=tuple(stated[0]), extras=tuple(stated[1])) if stated else None


def declared_by_release(package: ResolvedPackage, base: Base, context: LockContext) -> Declared | None:
    """What a release declares: a wheel of it that the base can install, else its sdist; None: only a build would tell.

    Raises:
        NetworkError: the file cannot be downloaded.
        CheckRefusedError: the wheel has another hash than the index states, or is not a wheel.
    """
    title, wheels = package.title, package.wheels
    if not wheels:
        try:
            (read,) = compile_metadata([package.name], {package.name: package}, None, context)
        except CheckRefusedError:
            return None
        return Declared(by=title, lines=read.requires_dist, extras=read.provides_extra)
    tags = base_tags(base)
    # Only its METADATA is read: without one for the base, the first one will do.
    file = next((wheel for wheel in wheels if tags_of(wheel.name) & tags), wheels[0])
    from packaging.metadata import parse_email  # not needed where nothing is to be read

    raw, _ = parse_email(wheel_metadata(file, title, context))
    return Declared(by=title, lines=tuple(raw.get("requires_dist", [])), extras=tuple(raw.get("provides_extra", [])))
