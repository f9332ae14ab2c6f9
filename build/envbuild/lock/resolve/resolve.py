"""The step `resolve`: uv resolves the project, and once more with every version pinned."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.catalog.stack import Phase
from envbuild.core import tomlread
from envbuild.core.background import Background, run_in_background
from envbuild.core.errors import ResolutionError
from envbuild.core.files import machine_errors
from envbuild.lock.components.asked_sources import refuse_barred, refuse_missing, settle, words_of
from envbuild.lock.components.models import CompileMetadata, GitSources
from envbuild.lock.components.placeholders import is_stub
from envbuild.lock.components.releases import EXACT
from envbuild.lock.context import LockContext
from envbuild.lock.inputs.request import may_deviate
from envbuild.lock.lockfile import PROJECT_FILE, UV_LOCK, LockDirectory
from envbuild.lock.models import LockedProject
from envbuild.lock.project.plan import LockPlan
from envbuild.lock.project.pyproject import Project, main_lines, with_git_sources
from envbuild.lock.requirement_lines import PinnedRequirement
from envbuild.lock.resolve.builds import build_constraints
from envbuild.lock.resolve.conflicts import explain_pins
from envbuild.lock.resolve.declarations import with_declarations
from envbuild.lock.uv.explanation import names_in, not_there
from envbuild.lock.uv.preferences import prefer
from envbuild.lock.uv.resolution import Resolution, resolve, throw_away
from envbuild.lock.uv_lock import Packages

# uv's words for what only the project itself may take from elsewhere than the index.
# Releases that ask for an address are refused too (astral-sh/uv#1808, #5070).
_URL_REFUSED = re.compile(r"Package `([^`]+)`\s+was\s+included\s+as\s+a\s+URL\s+dependency")


@dataclass(frozen=True, kw_only=True)
class PhaseLines:
    """What is installed, as pinned requirements: before the compile phase, and in it."""

    main: tuple[PinnedRequirement, ...]
    compiled: tuple[PinnedRequirement, ...]


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """A plan without what nothing asks for, and what uv found for it.

    Attributes:
        build_constraints: what the isolated builds of the packages from git take.
        lines: what is installed; None: what `uv export` says of the resolved project.
        tree: the uv project that it is of; None: it is a stack's own.
        wheels: digests of the wheels of that project's own packages, by file.
    """

    plan: LockPlan
    resolution: Resolution
    build_constraints: tuple[str, ...] = ()
    lines: PhaseLines | None = None
    tree: LockedProject | None = None
    wheels: Mapping[str, str] = field(default_factory=dict)

    @property
    def pins(self) -> dict[str, str]:
        """Every version, but those of packages that a commit pins already."""
        direct = self.plan.project.pinned_directly()
        return {name: version for name, version in self.resolution.pins.items() if name not in direct}


@dataclass(frozen=True, kw_only=True)
class Guess:
    """The resolution of a guessed project, under way.

    Attributes:
        text: the project that is resolved.
        folder: where.
    """

    text: str
    folder: Path
    answer: Background[Resolution]

    def into(self, folder: Path) -> Resolution:
        """Wait for it, and put its uv.lock into another folder.

        Raises:
            EnvbuildError: what resolving raised.
        """
        resolution = self.answer.result()
        with machine_errors(folder):
            (folder / UV_LOCK).write_bytes((self.folder / UV_LOCK).read_bytes())
        return resolution


def begin_guess(plan: LockPlan, context: LockContext) -> Guess | None:
    """Begin to resolve a plan whose compile phase is not read yet, as if it declared what it did in another lock.

    Most of the time it does: an sdist does not change. None where there is nothing to guess, or nothing to guess from.
    """
    like = plan.inputs.like
    guessed = _guess(plan.project, like) if like is not None else None
    if guessed is None:
        return None
    text = replace(plan, project=guessed).kept_text
    folder = throw_away(text, context)
    prefer(folder, plan.preferred)
    quiet = context.quiet()
    answer = run_in_background(lambda: resolve(folder, plan.torch, plan.what, quiet, settings_may_be_ignored=True))
    return Guess(text=text, folder=folder, answer=answer)


def _guess(project: Project, like: LockDirectory) -> Project | None:
    components = project.chosen.values()
    # From a repository that has to be cloned first: uv ended half-way leaves a clone that is of no use.
    if not any(part.phase is Phase.COMPILE for part in components) or any(part.commit for part in components):
        return None
    with machine_errors(like.path):
        document = tomlread.loads((like.path / PROJECT_FILE).read_text())
    # What else the other lock's project depends on was declared by its compile phase.
    known = main_lines(project)
    return replace(
        project,
        build_requires=tuple(line for line in document["project"]["dependencies"] if line not in known),
        metadata=tuple(
            CompileMetadata(
                name=table["name"],
                version=table["version"],
                requires_dist=tuple(table["requires-dist"]),
                provides_extra=tuple(table.get("provides-extra", ())),
            )
            for table in document["tool"]["uv"].get("dependency-metadata", ())
        ),
    )


def resolve_plan(plan: LockPlan, files: Future[Packages], context: LockContext) -> ResolvedPlan:
    """Read what the compile phase declares, and resolve for the first time; a guess of it is resolved meanwhile.

    Args:
        files: the releases whose files are read.

    Raises:
        ResolutionError: the stack does not resolve.
        NetworkError: an index cannot be reached.
    """
    with contextlib.ExitStack() as ending:
        guess = begin_guess(plan, context)
        if guess is not None:
            ending.callback(guess.answer.stop)
        plan = with_declarations(plan, files, context)
        selection = plan.inputs.selection
        with (
            _explained(plan, context),
            context.reporter.step(f"resolve {selection.stack_name} on {selection.base_name}"),
        ):
            return resolve_first(plan, guess, context)


@contextlib.contextmanager
def _explained(plan: LockPlan, context: LockContext) -> Iterator[None]:
    """Explain why the block's resolution fails, where the user's pins take part."""
    try:
        yield
    except ResolutionError as error:
        inputs = plan.inputs
        # It is resolved anew without the versions of the existing lock (Search): only that failure is explained.
        if inputs.previous is not None:
            raise
        # An explanation takes up to a minute. Where a search goes on, the first of its failures is explained.
        if (inputs.deviations or inputs.request.fallback_from) and may_deviate(inputs.selection, inputs.request):
            raise
        raise explain_pins(plan, error, context) from None


def resolve_first(plan: LockPlan, guess: Guess | None, context: LockContext) -> ResolvedPlan:
    """Resolve, without yanked releases and those that only download a wheel."""
    try:
        resolution = _first(plan, guess, context)
    except ResolutionError as error:
        try:
            plan, resolution = _with_what_is_asked_for(plan, error, context)
        except ResolutionError as last:
            raise _explain_refused(last, plan.project.git_sources) from error
    # 2.13.0 takes 2.13.0+cpu too, and rather, where the site's find-links have it.
    while plan.torch.kind == "package-index" and "+" in (build := resolution.pins.get("torch", "")):
        context.reporter.note(f"  torch {build}, which this site has, is not the package index's build: without it")
        plan = replace(plan, torch=replace(plan.torch, not_these=(*plan.torch.not_these, build)))
        resolution = _once(plan, context)
    plan, resolution = _without_yanked(plan, resolution, context)
    plan, resolution = _without_stubs(plan, resolution, context)
    return ResolvedPlan(plan=plan, resolution=resolution)


def pin_plan(first: ResolvedPlan, context: LockContext) -> ResolvedPlan:
    """Resolve with every version pinned: the project of the lock.

    Raises:
        ResolutionError: the stack does not resolve.
        NetworkError: an index cannot be reached.
    """
    selection = first.plan.inputs.selection
    with (
        _explained(first.plan, context),
        context.reporter.step(f"pin the versions of {selection.stack_name} on {selection.base_name}"),
    ):
        return pinned(first, context)


def pinned(first: ResolvedPlan, context: LockContext) -> ResolvedPlan:
    plan, resolution = first.plan, first.resolution
    # Without a source that nothing asked for, other releases may be taken, which ask for fewer sources in turn.
    while (sources := settle(plan.project.git_sources, resolution.uv_lock.packages)) != plan.project.git_sources:
        before = plan.project.git_sources.in_force
        plan = replace(plan, project=with_git_sources(plan.project, sources))
        if sources.in_force != before:
            resolution = _once(plan, context)
    refuse_missing(plan.project.git_sources, resolution.uv_lock.packages)
    for name in sorted(plan.inputs.request.pins.keys() - plan.effective.stack.every_component().keys()):
        if canonicalize_name(name) not in plan.project.git_sources.in_force:
            context.reporter.note(f"note: nothing in the lock takes {name} from git, so its pin decides nothing")
    _refuse_other_sdists(plan, resolution)
    # uv.lock must be of the project that the lock holds, whose constraints pin every version: otherwise a plain `uv
    # sync` would resolve again.
    builds = build_constraints(plan, resolution, context)
    resolved = ResolvedPlan(plan=plan, resolution=resolution, build_constraints=builds)
    if (text := plan.project_text(resolved.pins)) == plan.kept_text:
        return resolved  # every version was kept: this is what was resolved
    # The NeMo 2.3 recipe takes 59 s with warm caches and 0.4 s offline (uv 0.13.8): what it waits for is the index.
    return replace(resolved, resolution=_once(plan, context, text=text, from_cache=True))


def _without_yanked(plan: LockPlan, resolution: Resolution, context: LockContext) -> tuple[LockPlan, Resolution]:
    """Without the yanked releases of components that only a preference names."""
    # uv takes a yanked release that a uv.lock names (PEP 592; astral-sh/uv#19112), and preferences are given as one.
    yanked: dict[str, str] = {
        name: f"!={resolution.pins[name]}"
        for name, component in plan.project.chosen.items()
        if name in resolution.yanked
        and name not in plan.keep
        and EXACT.match(component.wanted) is None
        and name in resolution.pins
    }
    if not yanked:
        return plan, resolution
    plan = _limited(plan, yanked)
    return plan, _once(plan, context)


def _without_stubs(plan: LockPlan, resolution: Resolution, context: LockContext) -> tuple[LockPlan, Resolution]:
    """Without sdists that download their wheel from another index, where other releases do.

    Upstream's own locks prefer them: there the same version comes from that index.
    """
    stubs = {name: f"!={release.version}" for name, release in resolution.packages.items() if is_stub(release, context)}
    if not stubs:
        return plan, resolution
    other = _limited(plan, stubs)
    try:
        return other, _once(other, context)
    except ResolutionError:
        # Something pins one: the check says which. A uv that fails leaves the uv.lock that is there.
        _write(plan.kept_text, context)
        return plan, resolution


def _limited(plan: LockPlan, limits: Mapping[str, str]) -> LockPlan:
    """The plan with more limits of what is taken of packages."""
    both = {name: ",".join(filter(None, (plan.project.limits.get(name), text))) for name, text in limits.items()}
    return replace(plan, project=replace(plan.project, limits={**plan.project.limits, **both}))


def _first(plan: LockPlan, guess: Guess | None, context: LockContext) -> Resolution:
    """Resolve; a guess is taken if it is the very same project."""
    _write(plan.kept_text, context)
    if guess is not None and guess.text == plan.kept_text:
        return guess.into(context.folder)
    if guess is not None:
        guess.answer.stop()
    prefer(context.folder, plan.preferred)
    return _once(plan, context)


def _once(plan: LockPlan, context: LockContext, *, text: str = "", from_cache: bool = False) -> Resolution:
    _write(text or plan.kept_text, context)
    # Settings that uv ignored are for a check to refuse, or the user to allow.
    return resolve(context.folder, plan.torch, plan.what, context, settings_may_be_ignored=True, from_cache=from_cache)


def _with_what_is_asked_for(
    plan: LockPlan, error: ResolutionError, context: LockContext
) -> tuple[LockPlan, Resolution]:
    """Resolve with what components need from git for sure, and with what uv then asks for.

    What an extra takes from git that nothing asks for would be in the way of a release of it that something needs.

    Args:
        error: why it does not resolve with all that may be taken.
    """
    every = plan.project.git_sources
    asked = {source.name for source in every.candidates if source.required}
    while (some := every.only(asked)).in_force != every.in_force:
        trial = replace(plan, project=with_git_sources(plan.project, some))
        try:
            resolution = _once(trial, context)
        except ResolutionError as other:
            # Asked for where only the project may say from where, or of which the index has nothing.
            refused = map(canonicalize_name, _URL_REFUSED.findall(other.why))
            needed = {*refused, *not_there(other.why)} & every.in_force.keys()
            if needed <= asked:
                raise
        else:
            # Of a package whose metadata is given, uv does not follow the sources, and so does not refuse them.
            needed = set(settle(every, resolution.uv_lock.packages).in_force)
            if needed <= asked:
                return trial, resolution
        asked |= needed
    raise error


def _explain_refused(error: ResolutionError, sources: GitSources) -> ResolutionError:
    """The error with what to do about a package that uv refuses to take from elsewhere, or does not find."""
    refused = list(dict.fromkeys(map(canonicalize_name, _URL_REFUSED.findall(error.why))))
    refuse_barred(sources, names_in(error.why))
    own = {source.name: source.chosen.index for source in sources.candidates if source.chosen.index} | dict(
        sources.indexes
    )
    if absent := {name: own[name] for name in not_there(error.why) if name in own}:
        indexes = ", ".join(sorted({repr(index) for index in absent.values()}))
        error = error.with_context(
            why="\n".join(
                [error.why, *(f"{name} is taken from index {index!r} alone." for name, index in absent.items())]
            ),
            fix=f"Take a release that is there. [indexes] of the site's configuration says where {indexes} is.",
        )
    missing = {source.name: source for source in sources.missing if source.name in {*refused, *not_there(error.why)}}
    if not refused and not missing:
        return error
    names = ", ".join(dict.fromkeys([*refused, *missing]))
    return error.with_context(
        why="\n".join([error.why, *map(words_of, missing.values())]),
        fix=f"Its authors take {names} from elsewhere ([tool.uv.sources]) in a way that is not followed: a path, a "
        "member of a workspace, or what a note above says could not be had. Reach its repository, or make it a "
        "component of the stack: [components.NAME] with git and ref, or with a version.",
    ).about(*missing)


def _refuse_other_sdists(plan: LockPlan, resolution: Resolution) -> None:
    """What was read of an sdist holds for the one that is locked."""
    locked = {(package.name, package.version): package.sdist for package in resolution.uv_lock.packages}
    for read in plan.project.metadata:
        sdist = locked.get((read.name, read.version))
        if sdist is not None and sdist.digest and sdist.digest != read.sdist_digest:
            raise ResolutionError(
                f"the index has another sdist of {read.name} {read.version} than a moment ago, or than the lock",
                why=f"Its metadata was read from {read.sdist_digest}; now the index states {sdist.digest}.",
                fix="Run again. If it stays, the index replaces files of a release, which no lock can hold.",
            )


def _write(text: str, context: LockContext) -> None:
    with machine_errors(context.folder):
        (context.folder / PROJECT_FILE).write_text(text)
