"""The steps `components` to `resolve` of a uv project: what its uv.lock says, as a resolved plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from packaging.version import Version

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.stack import Component, Phase, UvProject
from envbuild.core import tomlread
from envbuild.core.files import machine_errors
from envbuild.git.refs import GitRef
from envbuild.lock.components.decide import EffectiveStack
from envbuild.lock.components.models import Chosen, CompileMetadata, DecidedBy
from envbuild.lock.context import LockContext
from envbuild.lock.inputs.as_of import AsOf
from envbuild.lock.inputs.request import LockInputs
from envbuild.lock.lockfile import PROJECT_FILE, UV_LOCK
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import Project
from envbuild.lock.resolve.resolve import PhaseLines, ResolvedPlan
from envbuild.lock.uv.resolution import Resolution
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX, PACKAGE_INDEX_BUILD, TorchSource
from envbuild.lock.uv_lock import ResolvedPackage
from envbuild.lock.uv_project.exported import ProjectPackages, project_packages
from envbuild.lock.uv_project.tree import ProjectTree, project_tree
from envbuild.lock.uv_project.wheels import own_wheel

_GIT = re.compile(r"^(?P<url>[^?#]+)(?:\?(?P<query>[^#]*))?#(?P<commit>[0-9a-f]{40})$")


def resolve_project(inputs: LockInputs, definition: UvProject, context: LockContext) -> ResolvedPlan:
    """What the uv.lock of the project of a stack says, as if uv had resolved it now.

    Raises:
        ConfigurationError: the project is not there, or its uv.lock is not for its pyproject.toml or the base.
        ResolutionError: a package of its own does not build.
    """
    base = inputs.selection.base
    catalog = inputs.selection.catalog
    tree = project_tree(definition, catalog.path("stacks", inputs.selection.stack_name).parents[2])
    with context.reporter.step(f"read {UV_LOCK} of {tree.title}"):
        packages = project_packages(tree, base, context)
    own = [own_wheel(package, tree, base.python.version, context) for package in packages.local]
    settings = _settings(tree)
    uv_lock = packages.uv_lock
    late: set[str] = {*settings.get("no-build-isolation-package", ())}
    chosen = _chosen(packages, late, tree, context)
    torch = next((package.version for package in uv_lock.packages if package.name == "torch"), "")
    build = (Version(torch).local or PACKAGE_INDEX_BUILD) if torch else inputs.torch_build
    lines = [*packages.requirements, *(wheel.requirement for wheel in own)]
    resolution = Resolution(uv_lock=uv_lock)
    moment = datetime.fromtimestamp(resolution.newest_upload, timezone.utc)
    project = Project(
        name=inputs.selection.stack_name,
        base=base,
        torch_build=build,
        as_of=uv_lock.options.exclude_newer,
        chosen=chosen,
        requirements={line.name: f"=={line.version}" for line in lines if line.name not in chosen},
        overrides=_overrides(packages),
        metadata=_metadata(settings),
        wheels={wheel.package.name: wheel.file.name for wheel in own},
    )
    plan = LockPlan(
        inputs=inputs,
        project=project,
        as_of=AsOf(asked=UV_LOCK, moment=moment, reason=f"the newest file of {UV_LOCK} of {tree.title}"),
        effective=EffectiveStack(stack=inputs.selection.stack, leads=(), because=f"{UV_LOCK} of {tree.title}"),
        driver_problem="",
        torch=PACKAGE_INDEX if build == PACKAGE_INDEX_BUILD else TorchSource("torch-index", None),
        upstream_overrides={},
        left_out=(),
        keep={},
        exempt={},
    )
    with machine_errors(context.folder):
        (context.folder / UV_LOCK).write_bytes((tree.folder / UV_LOCK).read_bytes())
    compiled = {name for name, component in chosen.items() if component.phase is Phase.COMPILE}
    return ResolvedPlan(
        plan=plan,
        resolution=resolution,
        lines=PhaseLines(
            main=tuple(line for line in lines if line.name not in compiled),
            compiled=tuple(line for line in lines if line.name in compiled),
        ),
        tree=tree.record(),
        wheels={wheel.file.name: next(iter(wheel.requirement.hashes)) for wheel in own},
    )


def _settings(tree: ProjectTree) -> Mapping[str, Any]:
    with machine_errors(tree.folder, "read"):
        return tomlread.table_at(tomlread.loads((tree.folder / PROJECT_FILE).read_text()), "tool", "uv")


def known_components() -> dict[str, Component]:
    """What envbuild knows of packages, from the stacks that it has: the newest stack's word on each."""
    shipped = Catalog.shipped()
    known: dict[str, Component] = {}
    for name in sorted(shipped.names("stacks"), reverse=True):
        for package, component in shipped.stack(name).every_component().items():
            known.setdefault(package, component)
    return known


def _chosen(packages: ProjectPackages, late: set[str], tree: ProjectTree, context: LockContext) -> dict[str, Chosen]:
    """The packages that envbuild knows something of, and those that more than an index and a version decide."""
    known, by_name = known_components(), dict[str, Chosen]()
    there = {package.name: package for package in packages.uv_lock.packages}
    for name, package in there.items():
        if not (name in known or name in late or "registry" not in package.source):
            continue
        spec = known.get(name, Component())
        spec = Component(
            modules=spec.modules,
            uses=tuple(used for used in spec.uses if used in there),
            unused=spec.unused,
            phase=Phase.COMPILE if name in late else Phase.MAIN,
        )
        by_name[name] = _one(package, spec, tree, context)
    return by_name


def _one(package: ResolvedPackage, spec: Component, tree: ProjectTree, context: LockContext) -> Chosen:
    because = f"{UV_LOCK} of {tree.title}"
    bare = Chosen(
        name=package.name,
        spec=spec,
        asked=f"=={Version(package.version).public}" if package.version else package.name,
        origin=DecidedBy.UPSTREAM,
        because=because,
        specifier=f"=={Version(package.version).public}" if package.version else "",
        url=package.source.get("url", ""),
    )
    if (match := _GIT.match(package.source.get("git", ""))) is None:
        return bare
    words = dict(word.partition("=")[::2] for word in (match["query"] or "").split("&"))
    commit = context.repositories.open(match["url"]).resolve(GitRef(match["commit"]))
    return Chosen(
        name=package.name,
        spec=spec,
        asked=words.get("rev") or words.get("tag") or words.get("branch") or commit.sha,
        origin=DecidedBy.UPSTREAM,
        because=because,
        git=match["url"],
        commit=commit,
        subdirectory=words.get("subdirectory", ""),
    )


def _overrides(packages: ProjectPackages) -> dict[str, tuple[str, ...]]:
    by_name: dict[str, tuple[str, ...]] = {}
    for override in packages.uv_lock.manifest.overrides:
        if override.name:
            marker = f" ; {override.marker}" if override.marker else ""
            by_name[override.name] = (*by_name.get(override.name, ()), f"{override.specifier}{marker}")
    return by_name


def _metadata(settings: Mapping[str, Any]) -> tuple[CompileMetadata, ...]:
    return tuple(
        CompileMetadata(
            name=str(table["name"]),
            version=str(table.get("version", "")),
            requires_dist=tuple(table.get("requires-dist", ())),
            requires_python=str(table.get("requires-python", "")),
            provides_extra=tuple(table.get("provides-extra", ())),
        )
        for table in settings.get("dependency-metadata", ())
    )
