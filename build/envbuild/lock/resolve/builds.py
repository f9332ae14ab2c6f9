"""Which releases the isolated builds of the packages from git take, so that another day builds the same.

Of what the lock has, its version, where the build accepts that one: torch is then at hand from phase main. Of the rest
the newest release as of the lock's moment. A build's own limits (setuptools<80) never reach the environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from envbuild.catalog.stack import Phase
from envbuild.core.errors import ResolutionError
from envbuild.lock.components.downloads import base_tags, tags_of
from envbuild.lock.components.git_sources import without_isolation
from envbuild.lock.components.models import Chosen
from envbuild.lock.components.project_metadata import PYPROJECT, build_requires, readable
from envbuild.lock.components.sdist_metadata import metadata_files
from envbuild.lock.components.tree import trees_of
from envbuild.lock.components.upstream import holds_on
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import dates_of
from envbuild.lock.uv.named_index import isolated_build_error
from envbuild.lock.uv.package_index import PackageIndex
from envbuild.lock.uv.resolution import Resolution


def to_compile(plan: LockPlan, resolution: Resolution, repositories: Repositories) -> frozenset[str]:
    """The packages of phase main from the index that have no wheel, and that are built in the environment itself.

    Upstream's tree says so, or a recipe of the catalog is for them. An isolated build of one would take the newest
    torch, and not the lock's: mamba-ssm, causal-conv1d, nv-grouped-gemm, which Megatron-Bridge of early 2026 asks for.
    """
    project, tags = plan.project, base_tags(plan.project.base)
    chosen = {name for name, component in project.every.items() if name in project.chosen or not component.index}
    recipes = plan.inputs.selection.catalog.names("wheels")
    return frozenset(
        name
        for name in {*without_isolation(project.chosen, repositories), *recipes}
        if name not in chosen
        and (package := resolution.packages.get(name)) is not None
        and "registry" in package.source
        and not any(tags_of(wheel.name) & tags for wheel in package.wheels)
    )


def build_constraints(plan: LockPlan, resolution: Resolution, context: LockContext) -> tuple[str, ...]:
    """PEP 508 lines that hold for all of these builds.

    Raises:
        ConfigurationError: a build needs what the lock has from an index of its own.
        ResolutionError: a build needs what the index does not have as of the lock's moment.
    """
    pins = resolution.pins
    isolated = (component for component in plan.project.every.values() if component.phase is Phase.MAIN)
    needed = [
        (tree.component, line)
        for tree in trees_of(isolated, context.repositories)
        for line in readable(build_requires(tree.pyproject()))
        if holds_on(str(line.marker or ""), plan.project.base)
    ]
    _refuse_own_indexes(needed, plan, resolution, context)
    by_name: dict[str, set[str]] = {}
    asked: dict[str, dict[str, Chosen]] = {}
    for component, requirement in needed:
        name = canonicalize_name(requirement.name)
        locked = pins.get(name)
        if locked is not None and requirement.specifier.contains(locked, prereleases=True):
            by_name.setdefault(name, set()).add(locked)
        # An address names its file itself (PEP 508).
        elif requirement.url is None:
            asked.setdefault(name, {}).setdefault(str(requirement.specifier), component)
    # One range of each package in one question: a resolution has one version of it.
    while asked:
        ranges = {name: next(iter(ranges.items())) for name, ranges in asked.items()}
        asked = {name: dict([*ranges.items()][1:]) for name, ranges in asked.items() if len(ranges) > 1}
        for package, version in _newest(ranges, plan, context).items():
            by_name.setdefault(package, set()).add(version)
    return tuple(_line(name, [*versions]) for name, versions in sorted(by_name.items()))


def _refuse_own_indexes(
    needed: Sequence[tuple[Chosen, Requirement]], plan: LockPlan, resolution: Resolution, context: LockContext
) -> None:
    """Refuse what is of an index of its own, also where something else that the build needs depends on it."""
    places, packages = plan.own.places, resolution.packages
    if not places:
        return
    from_git = [(component.title, component.name, requirement) for component, requirement in needed]
    for title, component, requirement in (*from_git, *_needed_by_sdists(plan, resolution, context)):
        queue, seen = list[str]([canonicalize_name(requirement.name)]), set[str]()
        while queue:
            name = queue.pop()
            if name in places:
                raise isolated_build_error(title, component, f"{name} of index {places[name].name!r}")
            if name not in seen:
                seen.add(name)
                queue += [needed.name for needed in packages[name].dependencies] if name in packages else []


def _needed_by_sdists(
    plan: LockPlan, resolution: Resolution, context: LockContext
) -> Iterator[tuple[str, str, Requirement]]:
    """What builds the releases without a wheel for the base: for people, by name, and as a requirement."""
    base, compiled = plan.project.base, {*plan.project.compiled()}
    tags = base_tags(base)
    for name, package in resolution.packages.items():
        if name in compiled or package.sdist is None or any(tags_of(wheel.name) & tags for wheel in package.wheels):
            continue
        files, _ = metadata_files(package, context)
        try:
            lines = readable(build_requires(files.get(PYPROJECT, b"").decode()))
        except ValueError:
            continue  # uv says what is wrong with it
        yield from ((package.title, name, line) for line in lines if holds_on(str(line.marker or ""), base))


def _newest(ranges: Mapping[str, tuple[str, Chosen]], plan: LockPlan, context: LockContext) -> dict[str, str]:
    """The newest release of each package in its range."""
    wanted = {name: specifier for name, (specifier, _) in ranges.items()}
    builders = sorted({component.name for _, component in ranges.values()})
    index = PackageIndex(base=plan.project.base, context=context, own=plan.own, settings=dates_of(plan.project))
    try:
        packages = index.find(wanted, f"find what builds {', '.join(builders)}")
    except ResolutionError as error:
        raise error.about(*builders) from None
    return {name: packages[name].version for name in wanted}


def _line(name: str, versions: Sequence[str]) -> str:
    """Of two versions the newer one is the limit: the build that needs the older one says so itself."""
    newest = max(versions, key=Version)
    return f"{name}{'==' if len(versions) == 1 else '<='}{newest}"
