"""The steps `components` to `resolve` of a uv project: what its uv.lock says, as a resolved plan."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from packaging.utils import canonicalize_name
from packaging.version import Version

from envbuild.catalog.catalog import Catalog
from envbuild.catalog.stack import Component, Phase, UvProject
from envbuild.core.background import interruptible
from envbuild.core.errors import NetworkError
from envbuild.core.files import machine_errors
from envbuild.git.refs import UNREAD, Commit, CommitKind, GitRef
from envbuild.lock.components.decide import EffectiveStack
from envbuild.lock.components.models import Chosen, CompileMetadata, DecidedBy
from envbuild.lock.context import LockContext
from envbuild.lock.inputs.as_of import AsOf
from envbuild.lock.inputs.request import LockInputs
from envbuild.lock.lockfile import UV_LOCK
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import Project
from envbuild.lock.resolve.builds import build_constraints
from envbuild.lock.resolve.resolve import PhaseLines, ResolvedPlan
from envbuild.lock.uv.resolution import Resolution
from envbuild.lock.uv.torch_builds import PACKAGE_INDEX, PACKAGE_INDEX_BUILD, TorchSource
from envbuild.lock.uv_lock import ResolvedPackage, UvLock
from envbuild.lock.uv_project.exported import project_packages
from envbuild.lock.uv_project.settings import UvTable
from envbuild.lock.uv_project.tree import ProjectTree, project_tree
from envbuild.lock.uv_project.wheels import OwnWheel, own_wheel

_GIT = re.compile(r"^(?P<url>[^?#]+)(?:\?(?P<query>[^#]*))?#(?P<commit>[0-9a-f]{40})$")


def resolve_project(inputs: LockInputs, definition: UvProject, context: LockContext) -> ResolvedPlan:
    """What the uv.lock of the project of a stack says, as if uv had resolved it now.

    Raises:
        ConfigurationError: the project is not there, or its uv.lock is not for its pyproject.toml or the base.
        ResolutionError: a package of its own does not build.
    """
    base = inputs.selection.base
    tree = project_tree(definition, inputs.selection.folder, context)
    with context.reporter.step(f"read {UV_LOCK} of {tree.title}"):
        packages = project_packages(tree, base, context)
    settings = tree.settings
    late: set[str] = {canonicalize_name(name) for name in settings.no_build_isolation_package}
    own = [own_wheel(package, tree, base.python.version, context) for package in packages.local]
    uv_lock = _with_wheels(packages.uv_lock, own)
    chosen = _with_imports(_Chooser(tree, late, context).chosen(uv_lock), own, definition.imports)
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
        overrides=_overrides(uv_lock),
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
    constraints = _builds(plan, resolution, settings, context)
    compiled = {name for name, component in chosen.items() if component.phase is Phase.COMPILE}
    return ResolvedPlan(
        plan=plan,
        resolution=resolution,
        lines=PhaseLines(
            main=tuple(line for line in lines if line.name not in compiled),
            compiled=tuple(line for line in lines if line.name in compiled),
        ),
        build_constraints=constraints,
        tree=tree.record(),
        wheels={wheel.file.name: wheel.digest for wheel in own},
    )


def known_components() -> dict[str, Component]:
    """What envbuild knows of packages, from the stacks that it has: the newest stack's word on each."""
    shipped = Catalog.shipped()
    known: dict[str, Component] = {}
    for name in sorted(shipped.names("stacks"), reverse=True):
        for package, component in shipped.stack(name).every_component().items():
            known.setdefault(package, component)
    return known


def _with_wheels(uv_lock: UvLock, own: Sequence[OwnWheel]) -> UvLock:
    """A uv.lock with the project's own packages as their wheels."""
    wheels = {wheel.package.name: wheel.locked for wheel in own}
    return uv_lock.model_copy(update={"packages": tuple(wheels.get(part.name, part) for part in uv_lock.packages)})


def _with_imports(
    chosen: dict[str, Chosen], own: Sequence[OwnWheel], named: tuple[str, ...] | None
) -> dict[str, Chosen]:
    """Components of which the project's own have modules to import: those that are named, or all of their wheels."""
    modules = {wheel.package.name: wheel.modules for wheel in own}
    if named is not None:
        modules = {wheel.package.name: named for wheel in own[:1]}
    specs = {name: chosen[name].spec.model_copy(update={"modules": them}) for name, them in modules.items()}
    return chosen | {name: replace(chosen[name], spec=spec) for name, spec in specs.items()}


class _Chooser:
    """Makes components of the packages of a uv.lock of which more than a version is to be known."""

    def __init__(self, tree: ProjectTree, late: Collection[str], context: LockContext) -> None:
        self._because, self._late, self._context = f"{UV_LOCK} of {tree.title}", late, context
        self._indexes = {address.rstrip("/"): name for name, address in tree.indexes.items()}

    def chosen(self, uv_lock: UvLock) -> dict[str, Chosen]:
        """Those that envbuild knows something of, or that a commit, an address or an index of its own decides."""
        known, there = known_components(), {package.name: package for package in uv_lock.packages}
        torch = there.get("torch")
        # The site's places of torch's builds have what is released with torch, too.
        builds = torch.source.get("registry") if torch is not None and Version(torch.version).local else None
        own = {
            name: index
            for name, package in there.items()
            if (index := self._indexes.get(package.source.get("registry", "").rstrip("/")))
            and package.source["registry"] != builds
        }
        wanted = [
            package
            for name, package in there.items()
            if name in known or name in self._late or name in own or "registry" not in package.source
        ]
        commits = self._commits(wanted)
        unread = {name for name, commit in commits.items() if not commit.is_read}
        by_name = {}
        for package in wanted:
            spec = known.get(package.name, Component())
            uses = () if package.name in unread else spec.uses
            by_name[package.name] = self._one(
                package,
                Component(
                    modules=spec.modules,
                    uses=tuple(used for used in uses if used in there and used not in unread),
                    unused=spec.unused,
                    phase=Phase.COMPILE if package.name in self._late else Phase.MAIN,
                ),
                commits.get(package.name),
                own.get(package.name, ""),
            )
        return by_name

    def _commits(self, packages: Sequence[ResolvedPackage]) -> dict[str, Commit]:
        """The commits of those from git; without its date where the repository cannot be reached."""
        from_git = {package.name: match for package in packages if (match := _GIT.match(package.source.get("git", "")))}
        if not from_git:
            return {}
        urls = {match["url"] for match in from_git.values()}
        repositories = {url: self._context.repositories.open(url) for url in urls}

        def commit(match: re.Match[str]) -> Commit:
            try:
                return repositories[match["url"]].resolve(GitRef(match["commit"]))
            except NetworkError:
                sha = match["commit"]
                return Commit(sha=sha, committed_at=UNREAD, kind=CommitKind.COMMIT, name=sha)

        with self._context.reporter.step(f"read the commits of {len(from_git)} packages"), interruptible(8) as pool:
            commits = dict(zip(from_git, pool.map(commit, from_git.values()), strict=True))
        unread = [name for name, known in commits.items() if not known.is_read]
        if unread:
            self._context.reporter.note(
                f"note: not checked, for their repositories cannot be reached: {', '.join(sorted(unread))}"
            )
        return commits

    def _one(self, package: ResolvedPackage, spec: Component, commit: Commit | None, index: str) -> Chosen:
        specifier = f"=={Version(package.version).public}" if package.version else ""
        bare = Chosen(
            name=package.name,
            spec=spec,
            asked=specifier,
            origin=DecidedBy.UPSTREAM,
            because=self._because,
            specifier=specifier,
            url=package.source.get("url", ""),
            index=index,
        )
        if commit is None:
            return bare
        match = _GIT.match(package.source["git"])
        words = dict(urllib.parse.parse_qsl(match["query"] or "")) if match else {}
        return replace(
            bare,
            asked=words.get("rev") or words.get("tag") or words.get("branch") or commit.sha,
            specifier="",
            git=match["url"] if match else "",
            commit=commit,
            subdirectory=words.get("subdirectory", ""),
        )


def _builds(plan: LockPlan, resolution: Resolution, settings: UvTable, context: LockContext) -> tuple[str, ...]:
    """What the isolated builds of the packages from git are held to: the project's own words, and what there is now."""
    own = settings.build_constraint_dependencies
    read = {
        name: component
        for name, component in plan.project.chosen.items()
        if component.commit is not None and component.commit.is_read
    }
    if own or not read:
        return own
    try:
        return build_constraints(replace(plan, project=replace(plan.project, chosen=read)), resolution, context)
    except NetworkError as error:
        context.reporter.note(f"note: what builds {', '.join(read)} is not pinned: {error.what}")
        return ()


def _overrides(uv_lock: UvLock) -> dict[str, tuple[str, ...]]:
    by_name: dict[str, tuple[str, ...]] = {}
    for override in uv_lock.manifest.overrides:
        # One with a source of its own is a package of uv.lock from there.
        if override.name and (override.specifier or override.marker):
            marker = f" ; {override.marker}" if override.marker else ""
            by_name[override.name] = (*by_name.get(override.name, ()), f"{override.specifier}{marker}")
    return by_name


def _metadata(settings: UvTable) -> tuple[CompileMetadata, ...]:
    return tuple(
        CompileMetadata(
            name=stated.name,
            version=stated.version,
            requires_dist=stated.requires_dist,
            requires_python=stated.requires_python,
            provides_extra=stated.provides_extra,
        )
        for stated in settings.dependency_metadata
    )
