"""``envbuild lock``: from a stack and a base to a lock directory, in six steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.catalog.context import Context
from envbuild.core import locks
from envbuild.core.background import interruptible
from envbuild.core.digests import sha256_bytes, short
from envbuild.core.errors import CheckRefusedError, MachineError
from envbuild.core.files import refuse_unwritable, write_atomic
from envbuild.core.progress import Reporter
from envbuild.lock import lockfile
from envbuild.lock.checks.findings import refuse
from envbuild.lock.context import Repositories
from envbuild.lock.inputs.pins import GIT_PREFIX
from envbuild.lock.inputs.request import LockInputs, LockRequest, leaves_open
from envbuild.lock.lockdir import publish, refuse_to_replace, refuse_what_is_no_lock, tidy
from envbuild.lock.lockfile import LockDirectory, read_lock
from envbuild.lock.models import Lock
from envbuild.lock.verification import UNVERIFIED, VerifiedLock, Verify


@dataclass(frozen=True, kw_only=True)
class LockOptions:
    """Where a lock is written, and when it is made anew.

    Attributes:
        path: the lock directory.
        upgrade: resolve anew, as of now, even if nothing changed.
        verify: tries a lock before it is published, and also an existing one; what it finds refuses the lock unless
            the request lets it pass.
        preparing: makes the place where locks are verified while its block makes one; refuses to begin where there is
            none.
        named: the user named the path; otherwise no lock is replaced by one that is made in another way than the
            stack's file and the base say.
    """

    path: Path
    upgrade: bool = False
    verify: Verify | None = None
    preparing: Callable[[], contextlib.AbstractContextManager[None]] | None = None
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
            _note(path, _verified(reused, inputs, options))
            return LockResult(read_lock(path), built=False)
        refuse_unwritable(path)
        moved = moved_inputs(inputs, reused, repositories)
        with lock_made_anew(moved, existing, options, repositories, context) as folder:
            publish(folder, path)
    return LockResult(read_lock(path), built=True)


def moved_inputs(inputs: LockInputs, existing: LockDirectory | None, repositories: Repositories) -> LockInputs:
    """The inputs of the lock that replaces an existing one; where only branches moved, its versions stay."""
    moved = inputs.moved_on(existing)
    if existing is None or not moved.stays:
        return moved
    from envbuild.lock.search.history import pins_stay  # slow to import

    return moved.with_pins_of(existing.lock) if pins_stay(existing.lock, repositories) else moved


@contextlib.contextmanager
def lock_made_anew(
    inputs: LockInputs,
    existing: LockDirectory | None,
    options: LockOptions,
    repositories: Repositories,
    context: Context,
) -> Iterator[Path]:
    """A lock that was searched for and verified as the options say, in a folder that goes at the end.

    Args:
        existing: one in whose place it is made.

    Raises:
        EnvbuildError: nothing that was tried passes.
    """
    # A lock that is up to date takes 0.50 s of processor time on a busy machine, and 0.93 s with these imports.
    from envbuild.lock.search.search import searched_lock  # slow to import, and mostly there is nothing to do

    def accept(folder: Path) -> None:
        verified = _verified(read_lock(folder), inputs, options)
        if verified is None and leaves_open(inputs.selection.stack):
            verified = VerifiedLock(where=UNVERIFIED)
        _note(folder, verified)

    # Not sooner: apt and mmdebstrap are asked, 0.6 s of processor time, and what was verified once is known.
    preparing = options.preparing() if options.preparing is not None else contextlib.nullcontext()
    with preparing, searched_lock(inputs, existing, accept, repositories, context) as folder:
        yield folder


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


def _verified(directory: LockDirectory, inputs: LockInputs, options: LockOptions) -> VerifiedLock | None:
    """What verification shows, with the findings that the request lets pass; None without one."""
    if options.verify is None:
        return None
    found = options.verify(inputs.selection, directory)
    return replace(found, findings=refuse(found.findings, inputs.request.allow, inputs.title))


def _note(folder: Path, verified: VerifiedLock | None) -> None:
    """Write what verification showed into the record of a lock, where it does not have it."""
    if verified is None:
        return
    lock = read_lock(folder).lock
    found = [line for line in (finding.line() for finding in verified.findings) if line not in lock.allowed]
    noted = lock.model_copy(
        update={
            "allowed": (*lock.allowed, *found),
            "verified_in": verified.where,
            "stubbed": verified.stubbed,
            "base_image": verified.base_image,
            "base_made_at": verified.base_made_at,
        }
    )
    if noted != lock:
        write_atomic(folder / lockfile.RECORD_FILE, lockfile.render(lockfile.sealed(noted)).encode())


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
        name: (item.git, item.asked.removeprefix(GIT_PREFIX), item.commit)
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
        interruptible(len(branches)) as pool,
    ):
        opened = [(repositories.at(url), names) for url, names in branches.items()]
        answers = pool.map(lambda one: one[0].tips(one[1]), opened)
        tips = dict(zip(branches, answers, strict=True))
    moved = []
    for name, (url, branch, before) in followed.items():
        asked, now = lock.components[name].asked, tips[url].get(branch)
        if now is None:
            moved.append(f"{name}: branch {asked} is gone from {url}")
        elif now != before:
            moved.append(f"{name}: branch {asked} moved from {before[:12]} to {now[:12]}")
    return moved
