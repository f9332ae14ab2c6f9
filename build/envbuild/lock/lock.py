"""``envbuild lock``: from a stack and a base to a lock directory, or to the word that nothing changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.catalog import Selection
from envbuild.catalog.site import Site
from envbuild.core import locks
from envbuild.core.digests import sha256_bytes, short
from envbuild.core.errors import CheckRefusedError, MachineError, ResolutionError
from envbuild.core.files import machine_errors
from envbuild.core.progress import Reporter
from envbuild.git.refs import GitRef
from envbuild.lock import lockfile
from envbuild.lock.checks.rules import CheckFinding, refuse
from envbuild.lock.context import LockContext, Repositories
from envbuild.lock.inputs import as_of
from envbuild.lock.inputs.refs import GIT_PREFIX
from envbuild.lock.inputs.request import LockRequest, inputs_digest
from envbuild.lock.locate import shipped_lock
from envbuild.lock.lockdir import publish, refuse_to_replace, refuse_what_is_no_lock, tidy
from envbuild.lock.lockfile import Lock, LockDirectory, read_lock
from envbuild.lock.project.plan import make_plan
from envbuild.lock.record.write import write_lock
from envbuild.lock.resolve.conflicts import explain_pins
from envbuild.store.local import LocalStore

# Says what is wrong with a lock.
Accept = Callable[[LockDirectory], tuple[CheckFinding, ...]]


@dataclass(frozen=True)
class LockResult:
    """A lock directory, and whether this call made it."""

    directory: LockDirectory
    built: bool


def lock_stack(
    selection: Selection,
    *,
    path: Path,
    request: LockRequest,
    site: Site,
    store: LocalStore,
    reporter: Reporter,
    upgrade: bool = False,
    offline: bool = False,
    accept: Accept | None = None,
    named: bool = True,
) -> LockResult:
    """Lock a stack on a base, unless its lock is there already and nothing that decides it changed.

    Args:
        path: the lock directory.
        upgrade: resolve anew, as of now, even if nothing changed.
        offline: ask no git server; a branch is where it was when the lock was made.
        accept: tries a lock before it is published, and also one that is there already; what it finds refuses the
            lock unless the request lets it pass.
        named: the user named the place; otherwise no lock is replaced by one that is made in another way than the
            stack's file and the base say.

    Raises:
        UsageError: the lock that is there was made in another way, and ``path`` was not named.
        CheckRefusedError: ``accept`` found something; the lock that was there stays.
        ResolutionError: the stack does not resolve.
        NetworkError: an index, a repository, or the place of torch's build cannot be reached.
    """
    inputs = inputs_digest(selection, request)
    title = f"stack {selection.stack_name} on {selection.base_name}"
    repositories = Repositories(store, reporter, offline=offline)
    refuse_what_is_no_lock(path)
    if not named:
        refuse_to_replace(path, selection, request)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_writing(path, store, reporter))
        except MachineError:
            # No permission to write in the store. Where nothing is to be done, nothing is written: a lock that was
            # read whole is whole, whoever writes another one at this moment.
            found = None if upgrade or accept else _current(path, upgrade=False)
            if found is None or not _is_up_to_date(found, inputs, repositories, reporter, offline=offline):
                raise
            return LockResult(found, built=False)
        tidy(path)
        current = _current(path, upgrade=upgrade)
        there = None if upgrade else current
        if there is not None and _is_up_to_date(there, inputs, repositories, reporter, offline=offline):
            if accept is not None:
                refuse(accept(there), request.allow, title)
            return LockResult(there, built=False)
        with resolved(
            selection, request, repositories, site=site, store=store, reporter=reporter, previous=current
        ) as folder:
            if accept is not None:
                _note_allowed(folder, refuse(accept(read_lock(folder)), request.allow, title))
            publish(folder, path)
    return LockResult(read_lock(path), built=True)


def _writing(path: Path, store: LocalStore, reporter: Reporter) -> contextlib.AbstractContextManager[None]:
    """Be the only one who writes the lock directory ``path``."""
    return locks.exclusive(
        store.root / "locks" / f"lockfiles-{short(sha256_bytes(str(path.resolve()).encode()))}.lock",
        on_wait=lambda: reporter.note(f"another envbuild is writing {path}: waiting for it"),
    )


def _is_up_to_date(
    directory: LockDirectory, inputs: str, repositories: Repositories, reporter: Reporter, *, offline: bool
) -> bool:
    """Whether a lock is from these inputs, and no branch that it follows moved; says which did."""
    if directory.lock.inputs.digest != inputs:
        return False
    moved = [] if offline else moved_branches(directory.lock, repositories, reporter)
    for line in moved:
        reporter.note(line)
    return not moved


def _note_allowed(folder: Path, findings: tuple[CheckFinding, ...]) -> None:
    """Write the findings that were let pass into the record of a lock that is not published yet."""
    if findings:
        lock = read_lock(folder).lock
        allowed = (*lock.allowed, *[f"{finding.code}: {finding.what}" for finding in findings])
        noted = lockfile.sealed(lock.model_copy(update={"allowed": allowed}))
        with machine_errors(folder):
            (folder / lockfile.RECORD_FILE).write_text(lockfile.render(noted))


@contextlib.contextmanager
def resolved(
    selection: Selection,
    request: LockRequest,
    repositories: Repositories,
    *,
    site: Site,
    store: LocalStore,
    reporter: Reporter,
    previous: LockDirectory | None = None,
) -> Iterator[Path]:
    """A lock made anew, in a folder that goes at the end.

    Args:
        previous: the lock that was there. One from the same inputs as of the same moment keeps its versions: an index
            does not say when it yanked one, so a new resolution could come out differently.
    """
    inputs = inputs_digest(selection, request)
    like = previous or _shipped(selection)
    if previous is not None:
        made_from = previous.lock.inputs
        previous = previous if made_from.digest == inputs and made_from.as_of_asked != as_of.NOW else None
    with store.staging("lock") as folder:
        log = store.root / "logs" / f"lock-{selection.stack_name}-{selection.base_name}.log"
        with machine_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("")
        with contextlib.ExitStack() as ending:
            work = LockContext(
                folder=folder,
                log=log,
                site=site,
                store=store,
                reporter=reporter,
                repositories=repositories,
                ending=ending,
            )
            try:
                _write(selection, request, repositories, inputs, work, previous, like)
            except ResolutionError:
                if previous is None:
                    raise
                reporter.note("the versions of the lock that is there do not resolve any more: resolving without them")
                _write(selection, request, repositories, inputs, work, None, like)
        yield folder


def _shipped(selection: Selection) -> LockDirectory | None:
    """The stack's lock that comes with envbuild, as far as it can be read."""
    path = shipped_lock(selection.stack_name, selection.base_name)
    with contextlib.suppress(CheckRefusedError):
        return read_lock(path) if path is not None else None
    return None


def _write(
    selection: Selection,
    request: LockRequest,
    repositories: Repositories,
    inputs: str,
    work: LockContext,
    previous: LockDirectory | None,
    like: LockDirectory | None,
) -> None:
    plan = make_plan(selection, request, repositories, work, previous, like)
    try:
        write_lock(selection, plan, inputs, work, repositories)
    except ResolutionError as error:
        if previous is not None:
            raise
        raise explain_pins(plan, error, work) from None


def _current(path: Path, *, upgrade: bool) -> LockDirectory | None:
    """The lock that is there; None for none, or for one that cannot be read and is going to be replaced."""
    if not (path / lockfile.RECORD_FILE).is_file():
        return None
    try:
        return read_lock(path)
    except CheckRefusedError:
        if upgrade:
            return None
        raise


def moved_branches(lock: Lock, repositories: Repositories, reporter: Reporter) -> list[str]:
    """The branches that the lock follows and that are at another commit now, in words."""
    moved = []
    for name, item in lock.components.items():
        if item.git is None or item.commit is None or not item.follows:
            continue
        with reporter.step(f"ask where branch {item.asked} of {name} is"):
            now = repositories.at(item.git).resolve(GitRef(item.asked.removeprefix(GIT_PREFIX)))
        if now.sha != item.commit:
            moved.append(f"{name}: branch {item.asked} moved from {item.commit[:12]} to {now.sha[:12]}")
    return moved
