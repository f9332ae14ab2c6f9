"""``envbuild lock``: from a stack and a base to a lock directory, in six steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.core import locks
from envbuild.core.background import interruptible
from envbuild.core.digests import sha256_bytes, short
from envbuild.core.errors import BuildError, CheckRefusedError, EnvbuildError, MachineError, ResolutionError
from envbuild.core.files import machine_errors
from envbuild.core.progress import Reporter
from envbuild.lock import lockfile
from envbuild.lock.checks.findings import CheckFinding, refuse
from envbuild.lock.context import Repositories
from envbuild.lock.inputs.pins import GIT_PREFIX
from envbuild.lock.inputs.request import LockInputs, LockRequest, may_deviate
from envbuild.lock.lockdir import lock_on_base, publish, refuse_to_replace, refuse_what_is_no_lock, tidy
from envbuild.lock.lockfile import Lock, LockDirectory, read_lock
from envbuild.lock.verification import Verify

if TYPE_CHECKING:
    from envbuild.lock.search.session import SearchSession


@dataclass(frozen=True, kw_only=True)
class LockOptions:
    """Where a lock is written, and when it is made anew.

    Attributes:
        path: the lock directory.
        upgrade: resolve anew, as of now, even if nothing changed.
        verify: tries a lock before it is published, and also an existing one; what it finds refuses the lock unless
            the request lets it pass.
        older: go back along a branch where nothing works at its tip.
        session: gives what a search tried before it was interrupted; the argument: whether locks are verified.
        named: the user named the path; otherwise no lock is replaced by one that is made in another way than the
            stack's file and the base say.
    """

    path: Path
    upgrade: bool = False
    verify: Verify | None = None
    older: bool = True
    session: Callable[[bool], SearchSession] | None = None
    named: bool = True


@dataclass(frozen=True)
class LockResult:
    """A lock directory, and whether this call made it."""

    directory: LockDirectory
    built: bool


def lock_stack(selection: Selection, request: LockRequest, options: LockOptions, context: Context) -> LockResult:
    """Lock a stack on a base, unless its lock exists already and nothing that decides it changed.

    Raises:
        UsageError: the existing lock was made in another way, and its path was not named.
        CheckRefusedError: nothing that was tried passes the checks; the existing lock stays.
        ResolutionError: the stack does not resolve.
        NetworkError: an index, a repository, or the place of torch's build cannot be reached.
    """
    path, inputs = options.path, LockInputs.of(selection, request)
    repositories = Repositories(context.store, context.reporter)
    refuse_what_is_no_lock(path)
    # Every command takes lockfiles/STACK/BASE when no name is given: options alone must not change what that is.
    if not options.named:
        refuse_to_replace(path, selection, request)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_exclusive(path, context))
        except MachineError:
            # No permission to write in the store. An up-to-date lock needs none: what was read whole is whole, whoever
            # writes another one at this moment.
            found = None if options.upgrade or options.verify else _existing(path, upgrade=False)
            if found is None or not _is_up_to_date(found, inputs, repositories, context.reporter):
                raise
            return LockResult(found, built=False)
        # With the file lock held: the process that left something next to the lock has ended.
        tidy(path)
        existing = _existing(path, upgrade=options.upgrade)
        reused = None if options.upgrade else existing
        if reused is not None and _is_up_to_date(reused, inputs, repositories, context.reporter):
            _verified(reused, inputs, options)
            return LockResult(reused, built=False)
        from envbuild.lock.search.search import (
            SearchOptions,
            searched_lock,
        )  # slow to import, and mostly there is nothing to do

        def accept(folder: Path) -> None:
            _note(folder, *_verified(read_lock(folder), inputs, options))

        moved = inputs.moved_on(reused)
        session = options.session(options.verify is not None) if options.session is not None else None
        search = SearchOptions(older=options.older, session=session)
        with searched_lock(moved, existing, accept, repositories, context, search) as folder:
            publish(folder, path)
    return LockResult(read_lock(path), built=True)


def _exclusive(path: Path, context: Context) -> contextlib.AbstractContextManager[None]:
    """Be the only one who writes the lock directory ``path``."""
    return locks.exclusive(
        # In the store, since the lock directory itself is replaced as a whole; by the path's digest, since two projects
        # may have locks of one name.
        context.store.root / "locks" / f"lockfiles-{short(sha256_bytes(str(path.resolve()).encode()))}.lock",
        on_wait=lambda: context.reporter.note(f"another envbuild is writing {path}: waiting for it"),
    )


def _is_up_to_date(
    directory: LockDirectory, inputs: LockInputs, repositories: Repositories, reporter: Reporter
) -> bool:
    """Whether a lock is from these inputs, and no branch that it follows moved; reports which did."""
    if directory.lock.inputs.digest != inputs.digest:
        return False
    moved = moved_branches(directory.lock, repositories, reporter)
    for line in moved:
        reporter.note(line)
    return not moved


def _verified(
    directory: LockDirectory, inputs: LockInputs, options: LockOptions
) -> tuple[str, tuple[CheckFinding, ...]]:
    """Where a lock was verified, and the findings that the request lets pass."""
    if options.verify is None:
        return "", ()
    found = options.verify(inputs.selection, directory)
    return found.where, refuse(found.findings, inputs.request.allow, inputs.title)


def _note(folder: Path, where: str, findings: tuple[CheckFinding, ...]) -> None:
    """Write what verification showed into the record of a lock that is not published yet."""
    if findings or where:
        lock = read_lock(folder).lock
        allowed = (*lock.allowed, *[finding.line() for finding in findings])
        noted = lockfile.sealed(lock.model_copy(update={"allowed": allowed, "verified_in": where}))
        with machine_errors(folder):
            (folder / lockfile.RECORD_FILE).write_text(lockfile.render(noted))


def _existing(path: Path, *, upgrade: bool) -> LockDirectory | None:
    """The existing lock; None without one, or for one that cannot be read and is going to be replaced."""
    if not (path / lockfile.RECORD_FILE).is_file():
        return None
    try:
        return read_lock(path)
    except CheckRefusedError:
        if upgrade:
            return None
        raise


def moved_branches(lock: Lock, repositories: Repositories, reporter: Reporter) -> list[str]:
    """A line for each branch that the lock follows and that is at another commit now."""
    # Only a lock as of `now` follows its branches: as of a day a branch is where it was that day.
    followed = {
        name: (item.git, item.asked.removeprefix(GIT_PREFIX), item.head or item.commit)
        for name, item in lock.components.items()
        if item.git is not None and item.commit is not None and item.follows
    }
    if not followed:
        return []
    branches: dict[str, list[str]] = {}
    for url, branch, _ in followed.values():
        branches.setdefault(url, []).append(branch)
    with (
        reporter.step(f"ask where the branches of {', '.join(followed)} are"),
        interruptible(ThreadPoolExecutor(len(branches))) as pool,
    ):
        opened = [(repositories.at(url), names) for url, names in branches.items()]
        answers = pool.map(lambda one: one[0].tips(one[1]), opened)
        tips = dict(zip(branches, answers, strict=True))
    moved = []
    for name, (url, branch, before) in followed.items():
        # Where an older commit was taken, because the tip did not work, the lock is old once there is another tip.
        asked, now = lock.components[name].asked, tips[url].get(branch)
        if now is None:
            moved.append(f"{name}: branch {asked} is gone from {url}")
        elif now != before:
            moved.append(f"{name}: branch {asked} moved from {before[:12]} to {now[:12]}")
    return moved


def lock_on_fitting_base(
    selection: Selection,
    request: LockRequest,
    path_for: Callable[[Selection], Path],
    options_for: Callable[[Selection], LockOptions],
    context: Context,
) -> LockResult:
    """Lock a stack on its base; where the user named none and nothing works there, on the next base of the stack.

    An older commit of a branch is taken only where no base has a lock for the tip. The base that an earlier run with
    the same inputs fell back to comes first.

    Args:
        request: ``base_named`` where the user named the base.
        path_for: the lock directory for a stack and a base.
        options_for: the options for them.

    Raises:
        EnvbuildError: see :func:`lock_stack`; of the first base.
    """
    sessions: list[SearchSession] = []

    def session(verifies: bool) -> SearchSession:
        from envbuild.lock.search.session import SearchSession  # slow to import

        # One for all bases: the attempts on the first ones count, too, once the search goes on.
        if not sessions:
            sessions.append(SearchSession.of(selection, request, context, verifies=verifies))
        return sessions[0]

    def options_with_session(item: Selection) -> LockOptions:
        return replace(options_for(item), session=session)

    try:
        result = _on_one_base(selection, request, path_for, options_with_session, context)
    except (CheckRefusedError, ResolutionError, BuildError):
        _end(sessions)
        raise
    _end(sessions)
    return result


def _end(sessions: Sequence[SearchSession]) -> None:
    """End a search that was not interrupted: the next one tries everything again."""
    for session in sessions:
        session.end()


def _on_one_base(
    selection: Selection,
    request: LockRequest,
    path_for: Callable[[Selection], Path],
    options_for: Callable[[Selection], LockOptions],
    context: Context,
) -> LockResult:
    bases = [selection, *([] if request.base_named else _other_bases(selection))]
    default = selection.base_name
    if (remembered := _fallback(bases, request, path_for)) and not options_for(remembered).upgrade:
        bases = [remembered, *(item for item in bases if item is not remembered)]
        context.reporter.note(f"note: the lock is on base {remembered.base_name}, since {default} had none")
    failures: list[tuple[Selection, EnvbuildError]] = []
    for item, following in zip(bases, [*bases[1:], None], strict=True):
        options = replace(options_for(item), older=len(bases) == 1)
        fallback_from = default if item.base_name != default else ""
        own = replace(request, base_named=following is None, fallback_from=fallback_from)
        done = _tried(item, own, options, context)
        if isinstance(done, LockResult):
            return done
        if following is not None and not (may_deviate(item, request) or _is_of_another_cuda(done)):
            raise done
        failures.append((item, done))
        if following is not None:
            context.reporter.note(_next_base(item, following, done))
    older = failures if may_deviate(selection, request) and len(bases) > 1 else []
    for item, failure in older:
        if not _is_of_another_cuda(failure):
            fallback_from = default if item.base_name != default else ""
            own = replace(request, base_named=True, fallback_from=fallback_from)
            done = _tried(item, own, options_for(item), context)
            if isinstance(done, LockResult):
                return done
    raise failures[0][1]


def _fallback(
    bases: Sequence[Selection], request: LockRequest, path_for: Callable[[Selection], Path]
) -> Selection | None:
    """The base that was taken with the same inputs in the place of the first one, which has no lock; the newest."""
    found = []
    for item in bases:
        lock = lock_on_base(path_for(item), item.base_name)
        if lock is not None and item is bases[0]:
            return None
        same = lock is not None and lock.inputs.digest == LockInputs.of(item, request).digest
        if lock is not None and same and lock.fallback_from == bases[0].base_name:
            found.append((lock.inputs.as_of, item))
    return max(found, key=lambda one: one[0])[1] if found else None


def _tried(
    selection: Selection, request: LockRequest, options: LockOptions, context: Context
) -> LockResult | EnvbuildError:
    """The lock, or the failure that another base may not have."""
    try:
        return lock_stack(selection, request, options, context)
    except (CheckRefusedError, ResolutionError, BuildError) as error:
        return error


def _next_base(item: Selection, following: Selection, error: EnvbuildError) -> str:
    why = "its packages are of another CUDA than" if _is_of_another_cuda(error) else f"{error.what}: no lock on"
    has = " has" if _is_of_another_cuda(error) else ""
    return (
        f"{why} base {item.base_name}{has}: taking {following.base_name}, which stack {following.stack_name} names too"
    )


def _is_of_another_cuda(error: EnvbuildError) -> bool:
    return isinstance(error, CheckRefusedError) and error.codes == {"cuda-mixed"}


def _other_bases(selection: Selection) -> list[Selection]:
    """The selection on the other bases that the stack names for the target."""
    builds = selection.stack.builds_for(selection.target_name)
    return [
        Selection(selection.catalog, selection.stack_name, name, selection.target_name)
        for name in (builds.bases if builds else ())
        if name != selection.base_name
    ]
