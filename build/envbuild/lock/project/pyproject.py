"""The uv project of a lock: a pyproject.toml that plain ``uv sync`` understands too."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

import tomlkit

from envbuild.catalog.base import Base
from envbuild.catalog.stack import Phase
from envbuild.core.errors import ConfigurationError
from envbuild.core.tomlread import Toml
from envbuild.lock.components.as_of_moment import own_dates
from envbuild.lock.components.models import Chosen, CompileMetadata, GitSources
from envbuild.lock.components.project_metadata import name_of
from envbuild.lock.inputs.as_of import with_undated
from envbuild.lock.lockfile import WHEELS
from envbuild.lock.uv.named_index import ANY_RELEASE, builds_without
from envbuild.lock.uv.resolution import limits
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX_BUILD, TorchSource

_EXACT = re.compile(r"^==\s*[0-9][0-9a-z.]*$")
TORCH_INDEX_NAME = "torch-builds"


@dataclass(frozen=True, kw_only=True)
class Project:
    """All that a lock is resolved from.

    Attributes:
        as_of: nothing uploaded after this moment is taken (``2026-11-21T00:00:00Z``); empty: whatever there is.
        undated: packages that are not held to it, since their index states no upload times.
        requirements: specifiers of packages that components need without declaring them.
        build_requires: PEP 508 lines of what the compile phase needs to be installed already.
        overrides: what replaces what packages declare: specifiers by package, each with its marker if it has one
            (``>=2 ; python_version < '3.12'``).
        scoped_overrides: what replaces what one package declares: specifiers by package, by who declares it.
        git_sources: what components take from git or an address themselves.
        exempt: until when other packages than components may have been uploaded, or components in the stack's place.
        limits: which releases of packages that nothing here names may be taken.
        wheels: files in the lock's folder of wheels, by package.
    """

    name: str
    base: Base
    torch_build: str
    as_of: str
    chosen: Mapping[str, Chosen]
    undated: frozenset[str] = frozenset()
    requirements: Mapping[str, str] = field(default_factory=dict)
    build_requires: tuple[str, ...] = ()
    overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scoped_overrides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    metadata: tuple[CompileMetadata, ...] = ()
    git_sources: GitSources = field(default_factory=GitSources)
    exempt: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    wheels: Mapping[str, str] = field(default_factory=dict)

    @property
    def every(self) -> dict[str, Chosen]:
        """The components, and what those from git take from elsewhere themselves."""
        return {**self.chosen, **{name: source.chosen for name, source in self.git_sources.in_force.items()}}

    @property
    def asked(self) -> dict[str, str]:
        """The stack's specifiers, by package."""
        return {**{name: component.specifier for name, component in self.chosen.items()}, **self.requirements}

    def pinned_directly(self) -> frozenset[str]:
        """The packages that a commit or an address pins, so that no version needs to."""
        return frozenset(name for name, component in self.every.items() if component.is_direct)

    def released_users(self) -> list[str]:
        """The components that are releases and use one that is a release too, each with what it uses."""
        released = {name: component for name, component in self.chosen.items() if component.commit is None}
        pairs = (
            (name, used) for name, component in released.items() for used in component.spec.uses if used in released
        )
        return list(dict.fromkeys(name for pair in pairs for name in pair))

    def compiled(self) -> list[str]:
        """The packages of phase compile, as far as they are named."""
        return [name for name, component in self.every.items() if component.phase is Phase.COMPILE]


def with_git_sources(project: Project, git_sources: GitSources) -> Project:
    """The project with less that is taken, and without the metadata of what went."""
    gone = project.git_sources.in_force.keys() - git_sources.in_force.keys()
    return replace(
        project,
        git_sources=git_sources,
        metadata=tuple(declared for declared in project.metadata if declared.name not in gone),
    )


def requirement_of(name: str, version: str, extras: tuple[str, ...] = ()) -> str:
    """A PEP 508 requirement."""
    return f"{name}[{','.join(extras)}]{version}" if extras else f"{name}{version}"


def torch_specifier(version: str, build: str) -> str:
    """The specifier that takes one build only: ``==2.13.0`` and ``cpu`` give ``==2.13.0+cpu``.

    Raises:
        ConfigurationError: ``version`` is not an exact public version, so that it cannot name a build.
    """
    # `==2.13.0` accepts every build of 2.13.0; only a specifier with the local version names one (PEP 440, "Version
    # matching").
    if build == PACKAGE_INDEX_BUILD:
        return version
    if _EXACT.match(version) is None:
        raise ConfigurationError(
            f"the stack asks for torch {version or 'in any version'}, and the base for its build +{build}",
            why="A build belongs to one version: only an exact version can carry it.",
            fix="Write one in [components.torch], such as version = '==2.13.0', or take --torch-build index.",
        )
    return f"{version}+{build}"


def render_project(
    project: Project, *, pins: Mapping[str, str] | None = None, source: TorchSource | None = None
) -> str:
    """The text of pyproject.toml.

    Args:
        pins: every transitive version, as constraints, once they are known.
        source: where torch's build is; given only for the working copy, since a lock names no index.
    """
    base = project.base
    document = tomlkit.document()
    document.add(tomlkit.comment("Written by `envbuild lock`: the uv project of this lock, for plain `uv sync`."))
    if project.torch_build != PACKAGE_INDEX_BUILD:
        document.add(tomlkit.comment(f"Add --find-links with a place that has torch's +{project.torch_build} build."))
    if named := sorted({component.index for component in project.every.values() if component.index}):
        document.add(
            tomlkit.comment(f"Add [[tool.uv.index]] with name, url and explicit = true for {', '.join(named)}.")
        )
    phases = _requirements(project)
    document["project"] = {
        "name": f"envbuild-{project.name}",
        "version": "0",
        "requires-python": f"=={base.python.version}.*",
        "dependencies": _lines(phases[Phase.MAIN]),
        "optional-dependencies": {"compile": _lines(phases[Phase.COMPILE])},
    }
    # package = false: a project without sources, which uv does not try to build.
    uv: dict[str, Toml] = {"package": False, **limits(base), **dates_of(project)}
    if compiled := project.compiled():
        uv["no-build-isolation-package"] = _lines(compiled)
    if barred := project.git_sources.barred:
        # It may be another package of that name, and the lock is refused where it is asked for: its code is not run.
        uv["no-build-package"] = _lines(barred)
    if project.overrides or project.scoped_overrides:
        uv["override-dependencies"] = _overrides(project)
    if base.provides:
        # The base brings them: they must not be installed again, and uv must not look for them.
        # uv has a setting for it since astral-sh/uv#16528; before, an override with a marker that never holds.
        uv["exclude-dependencies"] = _lines(sorted(base.provides))
    # uv refuses a name that no index has: no other one is asked for these packages.
    sources = {name: {"index": component.index} for name, component in sorted(project.every.items()) if component.index}
    if constraints := _constraints(project, pins or {}, sources, source):
        uv["constraint-dependencies"] = _lines(constraints)
    uv |= builds_without({*sources, *project.git_sources.barred})
    _add_sources(uv, sources | {name: {"path": f"{WHEELS}/{file}"} for name, file in project.wheels.items()}, source)
    if unsourced := _unsourced(project, source):
        uv["no-sources-package"] = _lines(unsourced)
    if project.metadata:
        uv["dependency-metadata"] = _metadata(project)
    document["tool"] = {"uv": uv}
    return tomlkit.dumps(document)


def _constraints(
    project: Project, pins: Mapping[str, str], sources: Collection[str], source: TorchSource | None
) -> list[str]:
    taken = {name: git.chosen.wanted for name, git in sorted(project.git_sources.in_force.items())}
    return [
        *(f"{package}=={version}" for package, version in sorted(pins.items())),
        *(f"{name}{wanted}" for name, wanted in taken.items() if wanted),
        # uv takes the source of what is required or limited by the project, and drops a constraint without a range.
        *(f"{name}{ANY_RELEASE}" for name in sources),
        *(f"{name}{text}" for name, text in sorted(project.limits.items())),
        *(f"torch!={version}" for version in (source.not_these if source else ())),
    ]


def main_lines(project: Project) -> list[str]:
    """The requirements of phase main, as the project's pyproject.toml has them."""
    return _requirements(project)[Phase.MAIN]


def _add_sources(
    uv: MutableMapping[str, Toml], sources: Mapping[str, Mapping[str, str]], source: TorchSource | None
) -> None:
    """Add which packages are taken from which indexes, and where these are if that is known."""
    # explicit: no other package is taken from there (uv's documentation, "Package indexes").
    used = {entry.get("index") for entry in sources.values()}
    indexes: list[Toml] = [
        {"name": index.name, "url": index.url, "explicit": True}
        for index in (source.indexes if source is not None else ())
        if index.name in used
    ]
    if source is not None and source.kind == "torch-index":
        indexes.append({"name": TORCH_INDEX_NAME, "url": source.location or "", "explicit": True})
        sources = {**sources, "torch": {"index": TORCH_INDEX_NAME}}
    if indexes:
        uv["index"] = indexes
    if sources:
        uv["sources"] = dict(sources)


def with_indexes(text: str, source: TorchSource) -> str:
    """A lock's pyproject.toml with the indexes that have torch's build and others, where the lock itself names none."""
    document = tomlkit.parse(text)
    uv = document["tool"]["uv"]
    _add_sources(uv, uv.pop("sources", {}), source)
    if source.kind != "torch-index":
        return tomlkit.dumps(document)
    if unsourced := uv.get("no-sources-package"):
        uv["no-sources-package"] = [name for name in unsourced if name != "torch"]
    return tomlkit.dumps(document)


def _requirements(project: Project) -> dict[Phase, list[str]]:
    phases: dict[Phase, list[str]] = {phase: [] for phase in Phase}
    for name, component in project.chosen.items():
        if name in project.base.provides:
            continue
        version = component.wanted
        if name == "torch" and not component.is_direct:
            version = torch_specifier(version, project.torch_build)
        phases[component.phase].append(requirement_of(name, version, component.extras(project.base)))
    phases[Phase.MAIN] += [requirement_of(name, version) for name, version in project.requirements.items()]
    phases[Phase.MAIN] += project.build_requires
    # What builds a package without isolation must be installed before it.
    named = {name_of(line) for lines in phases.values() for line in lines} | {"torch"}
    needed = dict.fromkeys(line for source in project.git_sources.in_force.values() for line in source.build_requires)
    phases[Phase.MAIN] += [line for line in needed if name_of(line) not in named]
    return phases


def dates_of(project: Project) -> dict[str, Toml]:
    """The as-of moment, and dates of their own for packages that are newer than the rest, or have no upload time."""
    if not project.as_of:
        return {}
    dates: dict[str, str | bool] = dict(project.exempt)
    dates |= own_dates({name: component.spec for name, component in project.chosen.items() if component.commit is None})
    if project.torch_build != PACKAGE_INDEX_BUILD:
        # Wheels in a folder have no upload time; the exact version and its hash pin them instead.
        dates["torch"] = False
    dates = with_undated(dates, project.undated)
    return {"exclude-newer": project.as_of, **({"exclude-newer-package": dates} if dates else {})}


def _overrides(project: Project) -> tomlkit.items.Array:
    lines: list[object] = [f"{name}{text}" for name, texts in sorted(project.overrides.items()) for text in texts]
    for declared_by, specifiers in sorted(project.scoped_overrides.items()):
        # An entry for one package takes versions of an index alone, no address (astral-sh/uv#19970).
        entry = tomlkit.inline_table()
        entry["package"] = tomlkit.inline_table().append("name", declared_by)
        entry["dependencies"] = [f"{name}{text}" for name, text in sorted(specifiers.items())]
        lines.append(entry)
    return _lines(lines)


def _unsourced(project: Project, source: TorchSource | None) -> list[str]:
    """Packages for which [tool.uv.sources] of components from git is ignored.

    Megatron-Bridge takes megatron-core from its submodule so, and uv follows it into a dependency from git.
    """
    if all(component.commit is None for component in project.chosen.values()):
        return []
    from_index = source is not None and source.kind == "torch-index"
    names = [name for name, component in project.every.items() if not component.index]
    return [name for name in names if not (name == "torch" and from_index)]


def _metadata(project: Project) -> tomlkit.items.AoT:
    tables = tomlkit.aot()
    for declared in project.metadata:
        table = tomlkit.table()
        table["name"] = declared.name
        # For its version only. Wrong metadata hides conflicts: without nvidia-cudnn-frontend>=1.29.0 of Transformer
        # Engine 2.20.2, uv 0.13.8 resolves it together with mamba-ssm 2.3.2.post1, which excludes that.
        if declared.version:
            table["version"] = declared.version
        if declared.requires_python:
            table["requires-python"] = declared.requires_python
        table["requires-dist"] = _lines(list(declared.requires_dist))
        if declared.provides_extra:
            table["provides-extra"] = _lines(list(declared.provides_extra))
        tables.append(table)
    return tables


def _lines(values: Sequence[object]) -> tomlkit.items.Array:
    array = tomlkit.array()
    array.extend(values)
    return array.multiline(len(values) > 1)
