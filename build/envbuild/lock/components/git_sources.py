"""Packages that components from git take from git, or from an address, themselves: ``[tool.uv.sources]``.

uv follows such a source only as far as it sees it from the project that it locks; deeper, it refuses "URL
dependencies". So the lock's own project names them, at the commits that their refs mean here: each as a constraint,
which asks for nothing, and under ``no-sources-package``, so that no other declaration of it counts. Which of them are
really asked for only a resolution tells (a release may ask for an extra of a component from git):
:func:`~envbuild.lock.components.asked_sources.settle` looks, and leaves out the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from packaging.utils import canonicalize_name

from envbuild.catalog.base import Base
from envbuild.catalog.stack import Component, Phase
from envbuild.core.errors import CheckRefusedError, ConfigurationError, EnvbuildError, NetworkError
from envbuild.core.progress import Reporter
from envbuild.core.text import quoted_command
from envbuild.git.refs import GitRef
from envbuild.lock.components.asked_sources import is_outage, named_source_error, refuse_two, where
from envbuild.lock.components.git_metadata import declared_by, metadata_of_tree
from envbuild.lock.components.models import (
    ALWAYS,
    ANY,
    BUILD,
    PROJECT,
    Chosen,
    DecidedBy,
    GitSource,
    GitSources,
    Lead,
    MissingSource,
)
from envbuild.lock.components.project_metadata import (
    PYPROJECT,
    UvSource,
    build_requires,
    needed_of_environment,
    read_requirement,
    readable,
    uv_settings,
)
from envbuild.lock.components.tree import Tree, tree_of, trees_of
from envbuild.lock.components.tree_sources import (
    IndexNotConfiguredError,
    configured_index,
    folder_of,
    refuse_two_addresses,
    sources_of,
)
from envbuild.lock.components.upstream import OVERRIDES, SOURCES, holds_on, overrides
from envbuild.lock.context import Repositories
from envbuild.lock.inputs.as_of import Bound
from envbuild.lock.inputs.pins import Ref, ref_text
from envbuild.lock.uv.named_index import NamedIndex, OwnIndexes, isolated_build_error


@dataclass
class GitSourceReader:
    """Finds what the components from git of one lock take.

    Attributes:
        ruled: packages of which the stack has an override, or that the base brings: nothing is taken of them.
        forced: where a leading component takes a package from, whoever asks for it (an override of its upstream).
        pins: what the user says of packages that are no components.
        as_of: a branch means its commit of then; None: its tip.
        indexes: where the site has indexes that components name, by name.
        required: packages that the stack requires itself, or the search adds.
    """

    base: Base
    repositories: Repositories
    reporter: Reporter
    ruled: Collection[str]
    forced: Mapping[str, tuple[UvSource, Chosen]]
    pins: Mapping[str, Ref]
    as_of: Bound
    indexes: Mapping[str, str] = field(default_factory=dict)
    required: Collection[str] = ()

    def sources(self, chosen: Mapping[str, Chosen]) -> GitSources:
        """What may be taken from elsewhere than the index, besides the components themselves.

        Raises:
            ConfigurationError: a pyproject.toml cannot be understood, or a ref does not exist.
            NetworkError: the repository of what is needed for certain cannot be reached now.
            ResolutionError: two components need a package at different commits.
        """
        candidates: list[GitSource] = []
        missing: list[MissingSource] = []
        overruled: dict[str, str] = {}
        indexes: dict[str, str] = {}
        declared: dict[str, tuple[str, Chosen]] = {}
        queue = [(component, True, frozenset(component.extras(self.base))) for component in chosen.values()]
        seen: set[tuple[str, tuple[str, str]]] = set()
        while queue:
            by, required, extras = queue.pop(0)
            for source, parts in self._sources(by):
                text = f"{source.text} ({where(by)})"
                refuse_two_addresses(declared, source, by)
                if self._is_only_there(source):
                    # What the stack or a deviation says of its releases holds for those of that index.
                    if source.package in chosen and not chosen[source.package].is_direct:
                        self._refuse_another(indexes, source, by)
                        continue
                elif source.package in chosen or source.package in self.ruled:
                    overruled.setdefault(source.package, text)
                    continue
                needed = required and bool(parts & {ALWAYS, BUILD, PROJECT, *extras})
                place = self._place(source, by, parts, required=needed)
                if isinstance(place, MissingSource):
                    missing.append(place)
                    continue
                candidates.append(place)
                # Two packages may take each other.
                if (place.name, place.identity) not in seen:
                    seen.add((place.name, place.identity))
                    queue.append((place.chosen, needed, frozenset()))
        # Of several for a package the first is in force (GitSources.in_force): one that is needed for certain.
        candidates.sort(key=lambda candidate: not candidate.required)
        # The others only once a resolution shows that they are asked for (settle).
        refuse_two([candidate for candidate in candidates if candidate.required])
        return GitSources(candidates=tuple(candidates), missing=tuple(missing), overruled=overruled, indexes=indexes)

    def _is_only_there(self, source: UvSource) -> bool:
        """Whether a package is taken from an index that is for it alone: another index's is another package."""
        # The base brings a package, or the site says where torch's builds are, whatever an index is for.
        return source.explicit and source.package != "torch" and source.package not in self.base.provides

    def _refuse_another(self, indexes: dict[str, str], source: UvSource, by: Chosen) -> None:
        """Note the index of a component of the stack."""
        configured_index(source, by, self.indexes)
        other = indexes.setdefault(source.package, source.index)
        if other != source.index:
            raise ConfigurationError(
                f"{source.package} is taken from two indexes: {other} and {source.index}",
                why=f"{where(by)} names {source.index}.",
                fix="Take another commit of one of the components that say so.",
            )

    def _sources(self, by: Chosen) -> list[tuple[UvSource, frozenset[str]]]:
        """The sources of a component that hold on the base, each with the parts of it that they are for."""
        tree = tree_of(by, self.repositories)
        if tree is None:
            return []
        try:
            sources = [source for source in sources_of(tree) if not source.group and holds_on(source.marker, self.base)]
            sources = [source for source in sources if source.package != by.name and not self._is_general(source, by)]
            sources = [source for source in sources if source.package not in self.forced]
            sources += [forced_range for forced_range, _ in self.forced.values() if forced_range.package != by.name]
            if not sources:
                return []
            self._refuse_isolated(tree, sources)
            parts = self._parts(tree)
        except ValueError as error:
            fix = f"Take another commit of it: --pin {by.name}=REF"
            raise tree.not_understood(SOURCES, error, fix) from error
        listed = []
        for source in sources:
            # None: only a build would tell what it needs, so every source may be meant.
            named = frozenset({source.extra or ANY}) if parts is None else parts.get(source.package, frozenset())
            if source.extra:
                named &= {source.extra}
            # Also of what its tree does not declare: it was meant for that name.
            if source.package in self.required and self._is_only_there(source):
                named |= {PROJECT}
            if named:
                listed.append((source, named))
        return listed

    def _refuse_isolated(self, tree: Tree, sources: Sequence[UvSource]) -> None:
        """Refuse what an isolated build takes from an index of its own: uv asks the site's index there.

        Raises:
            ConfigurationError: the component is built so, and needs one of these.
        """
        if tree.component.phase is not Phase.MAIN:
            return
        needed = {canonicalize_name(requirement.name) for requirement in readable(build_requires(tree.pyproject()))}
        for source in sources:
            if source.package in needed and self._is_only_there(source):
                component = tree.component
                package = f"{source.package} of index {source.index!r}"
                raise isolated_build_error(component.title, component.name, package)

    def _is_general(self, source: UvSource, by: Chosen) -> bool:
        """Whether a source names an index that is not for it alone, and that the site does not know."""
        general = bool(source.index) and not source.explicit and source.index not in self.indexes
        if general and source.package not in self.ruled:
            self.reporter.note(
                f"note: {by.title} takes {source.package} from its index {source.index}, which is not explicit and not "
                "in the site's configuration: the site's own index is asked"
            )
        return general

    def _parts(self, tree: Tree) -> dict[str, frozenset[str]] | None:
        """For which parts of a component each package is needed on the base; None: not known before a build."""
        declared = declared_by(tree)
        if declared is None:
            return None
        lines, extras = declared
        by_name: dict[str, set[str]] = {}
        for line in lines:
            if (name := self._named(line, ALWAYS)) is not None:
                by_name.setdefault(name, set()).add(ALWAYS)
                continue
            for extra in extras:
                if (name := self._named(line, extra)) is not None:
                    by_name.setdefault(name, set()).add(canonicalize_name(extra))
        # An isolated build takes them by itself, and not into the environment.
        for line in needed_to_build(tree):
            if (name := self._named(line, ALWAYS)) is not None:
                by_name.setdefault(name, set()).add(BUILD)
        return {name: frozenset(parts) for name, parts in by_name.items()}

    def _named(self, line: str, extra: str) -> str | None:
        """The package that a requirement names, if it holds on the base with an extra."""
        requirement = read_requirement(line)
        if requirement is None or not holds_on(str(requirement.marker or ""), self.base, extra):
            return None
        return canonicalize_name(requirement.name)

    def _place(
        self, source: UvSource, by: Chosen, parts: frozenset[str], *, required: bool
    ) -> GitSource | MissingSource:
        """A package at the commit that its source means."""
        try:
            chosen = self._chosen(source, by)
            tree = tree_of(chosen, self.repositories)
            if tree is not None and chosen.phase is Phase.COMPILE:
                # Only tried: a tree that does not state its requirements counts as one that cannot be had.
                metadata_of_tree(tree, self.base.cuda_major)
            needs = needed_to_build(tree) if tree is not None else ()
        except ValueError as error:
            raise ConfigurationError(
                f"cannot understand pyproject.toml of {source.text}",
                why=f"{where(by)} takes it from there. {error}",
                fix=f"Say which to take instead: {quoted_command('--pin', f'{source.package}=REF')}",
            ).at_upstream() from error
        except (CheckRefusedError, ConfigurationError, NetworkError) as error:
            if source.package in self.pins:
                raise
            if required and (is_outage(error) or isinstance(error, IndexNotConfiguredError)):
                raise named_source_error(error, source.package, by, source.text) from error
            if not required:
                self._note_missing(source, by, parts, error)
            barred = isinstance(error, IndexNotConfiguredError)
            return MissingSource(name=source.package, by=by, parts=parts, place=source.text, error=error, barred=barred)
        return GitSource(chosen=chosen, by=by, parts=parts, required=required, build_requires=needs)

    def _note_missing(self, source: UvSource, by: Chosen, parts: frozenset[str], error: EnvbuildError) -> None:
        extras = sorted(parts - {ALWAYS, ANY, BUILD, PROJECT})
        asked = f"{by.name}[{','.join(extras)}]" if extras else by.name
        self.reporter.note(
            f"note: {source.package} of {where(by)} is left alone, which matters only if something asks for {asked}: "
            f"{error.what}"
        )

    def _chosen(self, source: UvSource, by: Chosen) -> Chosen:
        because, spec = where(by), Component()
        if source.package in self.forced:
            by = self.forced[source.package][1]
            because = f"{OVERRIDES} of {by.title}"
        (tree,) = trees_of([by], self.repositories)
        if not source.index and source.package in uv_settings(tree.pyproject()).built_without_isolation:
            spec = Component(phase=Phase.COMPILE)
        bare = Chosen(name=source.package, spec=spec, asked="", origin=DecidedBy.UPSTREAM, because=because)
        if source.index:
            index = configured_index(source, by, self.indexes)
            bare = replace(bare, asked=f"any release of {source.text}", index=index)
        pin = self.pins.get(source.package)
        if pin is not None:
            return self._pinned(bare, source, pin)
        if source.index:
            return bare
        if source.url:
            return replace(bare, asked=source.url, url=source.url)
        if source.path or source.workspace:
            folder = folder_of(source, tree)
            return replace(bare, asked=by.asked, git=by.git, commit=by.commit, subdirectory=folder)
        repository = self.repositories.open(source.git)
        # As uv does with a source without rev, tag and branch.
        ref = source.git_ref or GitRef(f"refs/heads/{repository.default_branch()}")
        commit = repository.resolve(ref, self.as_of)
        asked = source.ref if source.ref_kind in ("rev", "tag") else ref.name
        return replace(bare, asked=asked, git=source.git, commit=commit, subdirectory=source.subdirectory)

    def _pinned(self, bare: Chosen, source: UvSource, pin: Ref) -> Chosen:
        because = f"pinned by the user, over {source.text} ({bare.because})"
        pinned = replace(bare, asked=ref_text(pin), origin=DecidedBy.PIN, because=because)
        if not isinstance(pin, GitRef):
            return replace(pinned, specifier=pin.specifier, spec=Component())
        if not source.git:
            raise ConfigurationError(
                f"{source.package}={pinned.asked} names a branch, tag or commit, and {source.package} has no "
                "repository",
                why=f"{bare.because} takes it from {source.text}.",
                fix=f"Pin a version: {quoted_command('--pin', f'{source.package}=VERSION')}",
            )
        commit = self.repositories.open(source.git).resolve(pin, self.as_of)
        return replace(pinned, git=source.git, commit=commit, subdirectory=source.subdirectory)


def needed_to_build(tree: Tree) -> tuple[str, ...]:
    """What must be in the environment for a package of phase compile to be built, as PEP 508 lines."""
    if tree.component.phase is not Phase.COMPILE:
        return ()
    return needed_of_environment(build_requires(tree.pyproject()))


def own_indexes(chosen: Mapping[str, Chosen], git_sources: GitSources, indexes: Sequence[NamedIndex]) -> OwnIndexes:
    """Which packages are taken from an index of their own.

    Args:
        chosen: of the components, those of which one says so count, and so does what they take themselves.
        indexes: of the site.
    """
    known = {index.name: index for index in indexes}
    names = {name: component.index for name, component in chosen.items() if component.index} | dict(git_sources.indexes)
    # Also what nothing asks for in the end: it is looked up before that is known.
    names |= {source.name: source.chosen.index for source in git_sources.candidates if source.chosen.index}
    return OwnIndexes(
        places={name: known[index] for name, index in names.items()},
        refused={
            source.name: source.error for source in git_sources.missing if source.barred and source.name not in names
        },
    )


def forced_sources(leads: Sequence[Lead], base: Base, repositories: Repositories) -> dict[str, tuple[UvSource, Chosen]]:
    """Where upstream's overrides take packages from, each with the leading component that says so; the first wins."""
    by_name: dict[str, tuple[UvSource, Chosen]] = {}
    for tree in trees_of((lead.chosen for lead in leads), repositories):
        for line in overrides(tree):
            if line.git and line.ref and holds_on(line.marker, base):
                source = UvSource(package=line.package, git=line.git, ref=line.ref, ref_kind="rev")
                by_name.setdefault(line.package, (source, tree.component))
    return by_name


def without_isolation(chosen: Mapping[str, Chosen], repositories: Repositories) -> dict[str, Chosen]:
    """The packages that trees of components build in the environment itself, each with the first that says so.

    Raises:
        ConfigurationError: a pyproject.toml cannot be understood.
    """
    by_name: dict[str, Chosen] = {}
    for tree in trees_of(chosen.values(), repositories):
        try:
            names = uv_settings(tree.pyproject()).built_without_isolation
        except ValueError as error:
            raise tree.not_understood(PYPROJECT, error) from error
        for name in names:
            by_name.setdefault(name, tree.component)
    return by_name


def with_upstreams_phases(
    chosen: Mapping[str, Chosen], compiled: Collection[str], leads: Sequence[Lead], repositories: Repositories
) -> dict[str, Chosen]:
    """The components; those from git that the tree of one builds without isolation are of phase compile.

    Args:
        compiled: packages of the index that are built so, too, or by a recipe: they become components.
        leads: what they say of the releases of these holds, as it does for other components.

    Raises:
        ConfigurationError: a pyproject.toml cannot be understood.
    """
    by_name, by = dict(chosen), without_isolation(chosen, repositories)
    for name, component in chosen.items():
        if component.commit is not None and name in by:
            by_name[name] = replace(component, spec=component.spec.model_copy(update={"phase": Phase.COMPILE}))
    for name in sorted({*compiled}):
        says = f"{PYPROJECT} [tool.uv] no-build-isolation-package of {by[name].title}" if name in by else "its recipe"
        spec = Component(phase=Phase.COMPILE)
        named = ((lead, lead.companions[name]) for lead in leads if name in lead.companions)
        lead, companion = next(((by_lead, part) for by_lead, part in named if part.specifier), (None, None))
        by_name[name] = Chosen(
            name=name,
            spec=spec,
            asked=companion.pinned if companion else "any release",
            specifier=companion.specifier if companion else "",
            origin=lead.origin if lead else DecidedBy.STACK,
            because=lead.because(companion) if lead and companion else f"{says}, and there is no wheel of it",
        )
    return by_name


def marked(chosen: Mapping[str, Chosen], git_sources: GitSources) -> dict[str, Chosen]:
    """The components; those of which another one says something else say so."""
    by_name = dict(chosen)
    for name, component in chosen.items():
        if index := git_sources.indexes.get(name):
            by_name[name] = replace(component, index=index, because=f"{component.because}, of index {index}")
            continue
        text = git_sources.overruled.get(name)
        if text is not None and component.origin in (DecidedBy.PIN, DecidedBy.STACK):
            by_name[name] = replace(component, because=f"{component.because}, over {text}")
    return by_name
