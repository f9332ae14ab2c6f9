"""What is going to be resolved: components decided, the as-of moment, what the compile phase declares."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Selection
from envbuild.catalog.models import Phase
from envbuild.core.background import beside
from envbuild.core.errors import ConfigurationError, NetworkError, ResolutionError
from envbuild.lock.checks.api_drift import read_ahead, read_names
from envbuild.lock.components import anchor_date as moments
from envbuild.lock.components.companion_ranges import hold_to_declared
from envbuild.lock.components.cuda_releases import for_cuda
from envbuild.lock.components.declarations import Declarations
from envbuild.lock.components.driver import Led, commit_without_llm, led
from envbuild.lock.components.git_metadata import metadata_of_commit
from envbuild.lock.components.git_sources import GitSourceReader, GitSources, marked
from envbuild.lock.components.models import Chosen, CompileMetadata, Exemption, Forced
from envbuild.lock.components.releases import Releases, likely
from envbuild.lock.components.sdist_metadata import build_requires, compile_metadata
from envbuild.lock.components.select import choose, choose_anchor, left_out, parse_pins, unknown_pin, upstream_overrides
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.inputs import as_of as asof
from envbuild.lock.inputs.as_of import AsOf
from envbuild.lock.inputs.refs import Ref
from envbuild.lock.inputs.request import LockRequest
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.project.pyproject import Project, cuda_major, extras_of
from envbuild.lock.resolve.prefetch import Begun, begin, filling_uvs_cache, kept_files
from envbuild.lock.uv.torch_builds import TorchSource, torch_source

# Build requirements that the environment has anyway, at the version that the stack says.
_ALREADY_THERE = frozenset({"torch"})


@dataclass(frozen=True, kw_only=True)
class LockPlan:
    """Everything that uv is going to be asked, and where it comes from.

    Attributes:
        led: the stack as it holds for the anchor, and why.
        left_out: what belongs to the anchor, or what leads in its place, and is no part of the stack.
        driver_problem: what the driver needs and a component from git does not have; empty: nothing.
        keep: versions of a lock made from the same inputs as of the same moment.
        api_read: done when the API check has read ahead.
        exempt: what may be newer than the as-of moment, beside components with a date of their own.
        begun: a resolution that was begun with a guess of what the compile phase declares.
    """

    request: LockRequest
    project: Project
    as_of: AsOf
    led: Led
    driver_problem: str
    torch: TorchSource
    upstream_overrides: Mapping[str, Forced]
    left_out: tuple[str, ...]
    keep: Mapping[str, str]
    api_read: Future[None]
    exempt: Mapping[str, Exemption] = field(default_factory=dict)
    begun: Begun | None = None


def make_plan(
    selection: Selection,
    request: LockRequest,
    repositories: Repositories,
    work: LockContext,
    previous: LockDirectory | None = None,
    like: LockDirectory | None = None,
) -> LockPlan:
    """Decide every component and the as-of moment, and read what the compile phase declares.

    Args:
        previous: a lock made from the same inputs, whose versions are kept if it is as of the same moment.
        like: a lock whose compile phase may declare the same.

    Raises:
        ConfigurationError: a ref does not exist, or cannot be used.
        UsageError: a pin or ``--as-of`` is wrong.
        NetworkError: a repository or an index cannot be reached.
    """
    decided = _decide(selection, request, repositories, work)
    without = _left_out(selection, decided, work)
    torch = _torch(selection, request, decided, work)
    forced = upstream_overrides(decided.led.leads, decided.chosen, repositories)
    project = _project(selection, request, decided, forced)
    keep = _kept(project, previous)
    begun = begin(project, keep, torch, like, f"resolve stack {selection.stack_name} on {selection.base_name}", work)
    files, api_read = _read_ahead(project, keep, previous, repositories, work)
    with contextlib.nullcontext() if begun else filling_uvs_cache(project, keep, torch, work):
        metadata = _metadata(project, keep, files, repositories, work)
    lines = dict.fromkeys(
        [
            *(line for item in metadata for line in item.build_requires),
            *git_build_requires(decided.chosen, repositories),
        ]
    )
    return LockPlan(
        request=request,
        project=_with_metadata(project, metadata, tuple(lines)),
        as_of=decided.as_of,
        led=decided.led,
        driver_problem=commit_without_llm(decided.chosen, decided.led.driver, repositories),
        torch=torch,
        upstream_overrides=forced,
        left_out=without,
        keep=keep,
        api_read=api_read,
        exempt=decided.exempt,
        begun=begun,
    )


@dataclass(frozen=True, kw_only=True)
class _Decided:
    """The stack as it holds for its anchor, every component of it, the as-of moment, and what is exempt from it."""

    led: Led
    chosen: dict[str, Chosen]
    as_of: AsOf
    takings: GitSources
    exempt: dict[str, Exemption]


def _left_out(selection: Selection, decided: _Decided, work: LockContext) -> tuple[str, ...]:
    """What is no part of the stack though it belongs to the anchor; told, as is what is exempt from the moment."""
    for name in sorted(decided.exempt.keys() & decided.chosen.keys()):
        work.reporter.note(f"exempt from the as-of moment: {name} {decided.exempt[name].text()}")
    without = left_out(decided.led.leads, decided.chosen)
    for text in without:
        work.reporter.note(f"note: no component of stack {selection.stack_name}, and so not in the lock: {text}")
    return without


def _torch_build(selection: Selection, request: LockRequest) -> str:
    return request.torch_build or selection.base.torch.build


def _torch(selection: Selection, request: LockRequest, decided: _Decided, work: LockContext) -> TorchSource:
    """Where torch's build is, unless the base brings torch or the stack has none."""
    base, torch = selection.base, decided.chosen.get("torch")
    if torch is None or "torch" in base.provides:
        return TorchSource("package-index", None)
    build = _torch_build(selection, request)
    with work.reporter.step(f"find torch's build {build!r}"):
        return torch_source(work.site, torch.specifier, build, base.python.version)


def _project(selection: Selection, request: LockRequest, decided: _Decided, forced: Mapping[str, Forced]) -> Project:
    """What uv is asked, but for what the compile phase declares."""
    stack = decided.led.stack
    return Project(
        name=selection.stack_name,
        base=selection.base,
        torch_build=_torch_build(selection, request),
        as_of=decided.as_of.text(),
        chosen=decided.chosen,
        requirements={name: item.version for name, item in stack.requirements.items()},
        overrides={
            **{name: item.texts for name, item in forced.items()},
            **{name: (stack.overrides[name].version,) for name in stack.overrides_of_all()},
        },
        scoped_overrides=stack.scoped_overrides(),
        takings=decided.takings,
        exempt={name: item.until for name, item in decided.exempt.items()},
    )


def _kept(project: Project, previous: LockDirectory | None) -> dict[str, str]:
    """The versions of a lock of the same moment, but for those that the project pins itself."""
    if previous is None or previous.lock.inputs.as_of != project.as_of:
        return {}
    direct = project.pinned_directly()
    return {name: version for name, version in previous.packages().items() if name not in direct}


def _read_ahead(
    project: Project,
    keep: Mapping[str, str],
    previous: LockDirectory | None,
    repositories: Repositories,
    work: LockContext,
) -> tuple[Future[dict[str, Mapping[str, Any]]], Future[None]]:
    """The files that will be read, and what the API check reads of them: both begun, and ended with the work."""
    files = beside(lambda: _files(project, keep, previous, work))
    api_read = beside(lambda: read_ahead(project, files.result(), work, repositories))
    for other in (files, api_read):
        work.ending.callback(other.stop)
    return files, api_read


def _decide(selection: Selection, request: LockRequest, repositories: Repositories, work: LockContext) -> _Decided:
    stack, base = selection.stack, selection.base
    pins = parse_pins(selection.stack_name, stack, request.pins)
    bound = moments.bound(selection, request.as_of, pins, repositories)
    anchor = choose_anchor(stack, pins, repositories, bound)
    moment = moments.as_of(selection, request.as_of, pins, anchor, repositories, work)
    if bound is None and moment.asked != asof.NOW:
        bound = moment.moment
    what = led(
        stack,
        anchor,
        pins,
        repositories,
        bound,
        base=base,
        reporter=work.reporter,
        releases=Releases(
            selection.catalog,
            base,
            moment.text(),
            moments.own_dates(stack),
            stack.undecided() - set(pins),
            work,
            repositories,
        ),
    )
    held = for_cuda(
        choose(what.stack, pins, what.leads, repositories, bound, base),
        base,
        request.torch_build or base.torch.build,
        moment,
        work,
        may_exempt=request.base_named,
    )
    dates = {**moments.own_dates(stack), **{name: item.until for name, item in held.exempt.items()}}
    settings = {"exclude-newer": moment.text(), "exclude-newer-package": dates}
    declarations = Declarations(base, settings, work, repositories)
    chosen = hold_to_declared(what.stack, held.chosen, base, declarations, work.reporter)
    takings = _takings(selection, what, chosen, pins, repositories, bound, work)
    return _Decided(led=what, chosen=marked(chosen, takings), as_of=moment, takings=takings, exempt=dict(held.exempt))


def _takings(
    selection: Selection,
    what: Led,
    chosen: Mapping[str, Chosen],
    pins: Mapping[str, Ref],
    repositories: Repositories,
    bound: date | datetime | None,
    work: LockContext,
) -> GitSources:
    """What the components from git take from elsewhere themselves, and the pins of it."""
    stack, base = selection.stack, selection.base
    others = {name: pin for name, pin in pins.items() if name not in stack.every_component()}
    forced = upstream_overrides(what.leads, chosen, repositories)
    takings = GitSourceReader(
        base=base,
        repositories=repositories,
        reporter=work.reporter,
        extras={name: extras_of(item, base) for name, item in chosen.items()},
        ruled={canonicalize_name(name) for name in (*stack.overrides_of_all(), *forced, *base.provides)},
        pins=others,
        as_of=bound,
        cuda_major=cuda_major(base),
    ).take(chosen)
    if unknown := others.keys() - takings.in_force.keys():
        raise unknown_pin(selection.stack_name, min(unknown), [*stack.every_component(), *takings.in_force])
    return takings


def git_build_requires(chosen: Mapping[str, Chosen], repositories: Repositories) -> list[str]:
    """What builds the components from git: they are installed without build isolation, so it must be there already."""
    lines: list[str] = []
    for item in chosen.values():
        if item.commit is None or item.git is None:
            continue
        text = repositories.at(item.git).read_file(item.commit, "pyproject.toml")
        try:
            lines += build_requires(text)
        except ValueError as error:
            raise ConfigurationError(
                f"cannot understand pyproject.toml of {item.git} at {item.commit.sha[:12]}",
                why=str(error),
                fix=f"Take another commit: --pin {item.name}=REF",
            ) from error
    return lines


def _with_metadata(project: Project, metadata: tuple[CompileMetadata, ...], lines: tuple[str, ...]) -> Project:
    named = {canonicalize_name(name) for name in (*project.chosen, *project.requirements)} | _ALREADY_THERE
    needed = tuple(line for line in lines if canonicalize_name(_name_of(line)) not in named)
    return replace(project, build_requires=needed, metadata=metadata)


def _name_of(line: str) -> str:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(line).name
    except InvalidRequirement as error:
        raise ResolutionError(
            f"a build requirement of a component cannot be read: {line!r}",
            why=str(error),
            fix="It comes from the component's pyproject.toml; choose another version of it.",
        ) from error


def _compiled(project: Project) -> list[str]:
    return [name for name, item in project.chosen.items() if item.phase is Phase.COMPILE and item.commit is None]


def _files(
    project: Project, keep: Mapping[str, str], previous: LockDirectory | None, work: LockContext
) -> dict[str, Mapping[str, Any]]:
    """The releases of which files are going to be read: sdists of the compile phase, wheels for the API check."""
    names = list(dict.fromkeys([*_compiled(project), *read_names(project)]))
    if not names:
        return {}
    return kept_files(names, keep, previous) or likely(project, names, keep, "find the files to read", work)


def _metadata(
    project: Project,
    keep: Mapping[str, str],
    files: Future[dict[str, Mapping[str, Any]]],
    repositories: Repositories,
    work: LockContext,
) -> tuple[CompileMetadata, ...]:
    released = _compiled(project)
    every = [*project.chosen.values(), *(item.chosen for item in project.takings.in_force.values())]
    from_git = [item for item in every if item.phase is Phase.COMPILE and item.commit is not None]
    cuda = cuda_major(project.base)
    if not released and not from_git:
        return ()
    with work.reporter.step(f"read what {len(released) + len(from_git)} packages of the compile phase declare"):

        def read(locked: Mapping[str, Mapping[str, Any]]) -> tuple[CompileMetadata, ...]:
            update = work.reporter.update
            return compile_metadata(released, locked, work.folder, cuda, work.site, work.store, update)

        trees = tuple(metadata_of_commit(item, repositories, cuda) for item in from_git)
        if not released:
            return trees
        try:
            return trees + read(files.result())
        except (NetworkError, ResolutionError):
            # The index is another one by now, or another component is at fault: asked anew, for these alone.
            return trees + read(likely(project, released, keep, "find the sdists of the compile phase", work))
