"""What packages declare, read before the whole is resolved: those of the compile phase, and those from git."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from envbuild.catalog.stack import Phase
from envbuild.core.background import run_in_background
from envbuild.core.errors import NetworkError, ResolutionError
from envbuild.core.files import machine_errors
from envbuild.lock.components.as_of_moment import own_dates
from envbuild.lock.components.git_metadata import metadata_of_tree, stated_metadata
from envbuild.lock.components.models import CompileMetadata
from envbuild.lock.components.project_metadata import name_of, needed_of_environment
from envbuild.lock.components.sdist_metadata import compile_metadata
from envbuild.lock.components.tree import trees_of
from envbuild.lock.context import LockContext
from envbuild.lock.lockfile import UV_LOCK, LockDirectory
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import Project
from envbuild.lock.uv.package_index import PackageIndex
from envbuild.lock.uv_lock import Packages, parse_uv_lock

# Build requirements that the environment has anyway, at the version that the stack says.
_ALREADY_THERE = frozenset({"torch"})


_HASH = re.compile(r"sha256:[0-9a-f]{64}")


@contextlib.contextmanager
def finding_files(plan: LockPlan, context: LockContext) -> Iterator[Future[Packages]]:
    """Find, while the block runs, the releases of which files are read: sdists, and wheels for the API check."""
    names = list(dict.fromkeys([*_compiled(plan.project), *plan.project.released_users()]))
    files = run_in_background(lambda: _find_files(plan, names, context))
    try:
        yield files
    finally:
        files.stop()


def _compiled(project: Project) -> list[str]:
    return [
        name
        for name, component in project.chosen.items()
        if component.phase is Phase.COMPILE and component.commit is None
    ]


def _find_files(plan: LockPlan, names: Sequence[str], context: LockContext) -> Packages:
    if not names:
        return {}
    kept = kept_files(names, plan.keep, plan.inputs.previous)
    return kept or _likely(plan, names, "find the files to read", context)


def kept_files(names: Sequence[str], keep: Mapping[str, str], previous: LockDirectory | None) -> Packages | None:
    """The releases that are kept, as the uv.lock next to their lock has them; None where it does not have them all.

    That file is not reviewed: only what has a hash that the lock itself states is taken.
    """
    path = previous.path / UV_LOCK if previous is not None else None
    if previous is None or path is None or not path.is_file():
        return None
    with machine_errors(path):
        try:
            tables = {package.name: package for package in parse_uv_lock(path.read_text()).packages}
        except ValueError:
            return None
        phases = [file.read_text() for phase in previous.lock.phases if (file := previous.file(phase)) is not None]
    stated = set(_HASH.findall("\n".join(phases)))
    for name in names:
        package = tables.get(name)
        if package is None or package.version != keep.get(name) or not package.files:
            return None
        if not all(file.url and file.digest in stated for file in package.files):
            return None
    return {name: tables[name] for name in names}


def _likely(plan: LockPlan, names: Sequence[str], what: str, context: LockContext) -> Packages:
    """The releases of components that a lock takes if nothing else holds them back, by name.

    Args:
        names: components from the index.
    """
    keep, chosen = plan.keep, plan.project.chosen
    wanted = {name: f"=={keep[name]}" if name in keep else chosen[name].wanted for name in names}
    return releases_as_of(plan, wanted, what, context)


def releases_as_of(plan: LockPlan, wanted: Mapping[str, str], what: str, context: LockContext) -> Packages:
    """The releases of components, by specifier, that uv takes as of the plan's moment, each by itself."""
    dates = {name: day for name, day in own_dates(plan.effective.stack.every_component()).items() if name in wanted}
    settings = plan.as_of.settings(dates)
    index = PackageIndex(base=plan.project.base, context=context, own=plan.own, settings=settings)
    return index.find(wanted, what, preferred=plan.preferred)


def with_declarations(plan: LockPlan, files: Future[Packages], context: LockContext) -> LockPlan:
    """The plan with what packages declare, and with what builds those of the compile phase.

    Raises:
        CheckRefusedError: what a package declares is not known before a build.
        NetworkError: a file cannot be downloaded.
    """
    project = plan.project
    compiled = _metadata(plan, files, context)
    # What builds a package that another one takes from git goes with it, where nothing asks for it in the end.
    own = [declared for declared in compiled if declared.name not in project.git_sources.in_force]
    lines = [line for declared in own for line in needed_of_environment(declared.build_requires)]
    named = {*project.chosen, *project.requirements} | _ALREADY_THERE
    needed = tuple(line for line in dict.fromkeys(lines) if name_of(line) not in named)
    return replace(plan, project=replace(project, build_requires=needed, metadata=(*compiled, *_stated(plan, context))))


def _stated(plan: LockPlan, context: LockContext) -> Iterator[CompileMetadata]:
    """What the packages from git state that are built in isolation, as far as nothing is left to their build."""
    components = plan.project.every.values()
    for tree in trees_of((part for part in components if part.phase is Phase.MAIN), context.repositories):
        if (stated := stated_metadata(tree)) is not None:
            yield stated


def _metadata(plan: LockPlan, files: Future[Packages], context: LockContext) -> tuple[CompileMetadata, ...]:
    project = plan.project
    released = _compiled(project)
    compiled = (component for component in project.every.values() if component.phase is Phase.COMPILE)
    from_git = [*trees_of(compiled, context.repositories)]
    cuda = project.base.cuda_major
    if not released and not from_git:
        return ()
    with context.reporter.step(f"read what {len(released) + len(from_git)} packages of the compile phase declare"):
        trees = tuple(metadata_of_tree(tree, cuda) for tree in from_git)
        if not released:
            return trees
        try:
            return trees + compile_metadata(released, files.result(), cuda, context)
        except (NetworkError, ResolutionError):
            # The index is another one by now, or another component is at fault: asked anew, for these alone.
            packages = _likely(plan, released, "find the sdists of the compile phase", context)
            return trees + compile_metadata(released, packages, cuda, context)
