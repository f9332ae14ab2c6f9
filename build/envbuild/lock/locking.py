"""``envbuild lock``: from a stack and a base to a lock directory, or to the word that nothing changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.catalog import SINGULAR, Selection, definition_digest
from envbuild.catalog.data import data_root
from envbuild.catalog.site import Site
from envbuild.core import locks
from envbuild.core.digests import Json, digest_of, sha256_bytes, short
from envbuild.core.errors import CheckRefusedError, ConfigurationError, MachineError, ResolutionError, UsageError
from envbuild.core.files import machine_errors
from envbuild.core.progress import Reporter
from envbuild.lock import asof, record
from envbuild.lock.blame import explain_pins
from envbuild.lock.checks import CheckFinding, refuse
from envbuild.lock.components import Repositories
from envbuild.lock.naming import checked_name
from envbuild.lock.place import publish, refuse_to_replace, refuse_what_is_no_lock, request_of, tidy
from envbuild.lock.planning import Request, make_plan
from envbuild.lock.ranges import may_hold
from envbuild.lock.record import Lock, LockDirectory, read_lock
from envbuild.lock.refs import GIT_PREFIX, GitRef
from envbuild.lock.workplace import Workplace
from envbuild.lock.writing import write_lock
from envbuild.store.local import LocalStore

# Raised when a lock made from the same inputs would come out differently.
FORMAT = 2


# Says what is wrong with a lock.
Accept = Callable[[LockDirectory], tuple[CheckFinding, ...]]


@dataclass(frozen=True)
class LockResult:
    """A lock directory, and whether this call made it."""

    directory: LockDirectory
    built: bool


def lock_path(project_dir: Path, name: str, base: str) -> Path:
    """Where a lock is written: ``name`` is the stack's, or that of a variant of it."""
    return project_dir / record.LOCKFILES / name / base


def shipped_lock(name: str, base: str) -> Path | None:
    """The lock directory that comes with envbuild; None when none does."""
    path = lock_path(data_root(), name, base)
    return path if (path / record.RECORD_FILE).is_file() else None


def find_lock(project_dir: Path, selection: Selection, name: str | None = None) -> LockDirectory:
    """The lock of a stack on a base: the project's own, else the one that comes with envbuild.

    The project's own is taken even where it is older than its stack (see :func:`is_older`); the other one only where
    it was made from the definitions that are in force in the project.

    Args:
        name: of a lock that is not the stack's own (``envbuild lock --name``).

    Raises:
        ConfigurationError: there is none, or only one that was made from other definitions; says how to make it.
        UsageError: the lock of that name is of another stack.
    """
    stack, base = selection.stack_name, selection.base_name
    kept = stack if name is None else checked_name(name)
    path = lock_path(project_dir, kept, base)
    if (path / record.RECORD_FILE).is_file():
        return _of_stack(read_lock(path), selection)
    if shipped := shipped_lock(kept, base):
        lock = _of_stack(read_lock(shipped), selection)
        _refuse_foreign(lock, selection, path)
        return lock
    named = "" if kept == stack else f" named {kept}"
    elsewhere = [file.parent.name for file in sorted(path.parent.glob(f"*/{record.RECORD_FILE}"))]
    raise ConfigurationError(
        f"there is no lock of stack {stack} on base {base}{named}",
        why=f"{path} does not exist" + (f"; {path.parent} has it on {', '.join(elsewhere)}." if elsewhere else "."),
        fix=f"Make it first: envbuild lock --stack {stack} --base {base} --target TARGET"
        + (f" --name {kept} (and its pins)" if named else ""),
    )


def _of_stack(directory: LockDirectory, selection: Selection) -> LockDirectory:
    """The lock, if it is of the selected stack: bases, targets and cases are chosen by the stack."""
    stack, name = directory.lock.stack, directory.path.parent.name
    if stack == selection.stack_name:
        return directory
    raise UsageError(
        f"the lock named {name} on base {directory.path.name} is not of stack {selection.stack_name}",
        why=f"{directory.path} was made from stack {stack}.",
        fix=f"Name its stack: --stack {stack}" + ("" if name == stack else f" --name {name}"),
    )


def _refuse_foreign(directory: LockDirectory, selection: Selection, own: Path) -> None:
    """Refuse a lock that comes with envbuild where the project defines something that decides it in another way."""
    lock, catalog = directory.lock, selection.catalog
    made_for = Selection(catalog, lock.stack, lock.base.name, selection.target_name)
    if not is_older(lock, made_for):
        return
    definitions = (
        ("stacks", lock.stack, made_for.stack, lock.inputs.stack_digest),
        ("bases", lock.base.name, made_for.base, lock.inputs.base_digest),
    )
    others = [
        f"{SINGULAR[kind]} {name} in {catalog.path(kind, name)}"
        for kind, name, now, was in definitions
        if definition_digest(now) != was
    ]
    named = "" if own.parent.name == lock.stack else f" --name {own.parent.name} (and its pins)"
    raise ConfigurationError(
        f"the lock of {own.parent.name} on {own.name} that comes with envbuild is not for the definitions here",
        why=f"{directory.path} was made from another definition than: "
        f"{', '.join(others) or f'the conflicts and companions in {catalog.folders[0]}'}.\n"
        f"This project has no lock of its own: {own} does not exist.",
        fix=f"Make it: envbuild lock --stack {lock.stack} --base {lock.base.name}{named}",
    )


def inputs_digest(selection: Selection, request: Request) -> str:
    """The digest of everything that decides a lock, except the moment and where branches stand."""
    value: dict[str, Json] = {
        "format": FORMAT,
        "stack": definition_digest(selection.stack),
        "base": definition_digest(selection.base),
        "torch_build": request.torch_build or selection.base.torch.build,
        "pins": dict(sorted(request.pins.items())),
        "as_of": request.as_of or "",
        "allow": [*sorted(set(request.allow))],
        **_companions(selection),
        **({"declared_ranges": True} if may_hold(selection.stack, request.pins) else {}),
        "conflicts": {name: definition_digest(item) for name, item in selection.catalog.conflicts().items()},
        # What the checks hold a lock to; a target's words are no part of it.
        "targets": {
            entry.target: [list(target.sm), target.driver or ""]
            for entry in selection.stack.builds
            for target in [selection.catalog.target(entry.target)]
        },
    }
    return digest_of(value)


def _companions(selection: Selection) -> dict[str, Json]:
    """The tables of companions that can decide something of the stack; nothing when none can."""
    stack = selection.stack
    leads = [name for name in (stack.anchor, stack.takeover.lead if stack.takeover else None) if name is not None]
    tables = {name: selection.catalog.companions(name) for name in leads}
    found: dict[str, Json] = {
        name: definition_digest(table)
        for name, table in tables.items()
        if table is not None and table.names() & stack.undecided()
    }
    return {"companions": found} if found else {}


def is_older(lock: Lock, selection: Selection) -> bool:
    """Whether the stack, the base, the conflicts or the companions are others than when the lock was made."""
    return lock.inputs.digest != inputs_digest(selection, request_of(lock))


def lock_stack(
    selection: Selection,
    *,
    path: Path,
    request: Request,
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
        noted = record.sealed(lock.model_copy(update={"allowed": allowed}))
        with machine_errors(folder):
            (folder / record.RECORD_FILE).write_text(record.render(noted))


@contextlib.contextmanager
def resolved(
    selection: Selection,
    request: Request,
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
        previous = previous if made_from.digest == inputs and made_from.as_of_asked != asof.NOW else None
    with store.staging("lock") as folder:
        log = store.root / "logs" / f"lock-{selection.stack_name}-{selection.base_name}.log"
        with machine_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("")
        with contextlib.ExitStack() as ending:
            work = Workplace(folder=folder, log=log, site=site, store=store, reporter=reporter, ending=ending)
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
    request: Request,
    repositories: Repositories,
    inputs: str,
    work: Workplace,
    previous: LockDirectory | None,
    like: LockDirectory | None,
) -> None:
    plan = make_plan(selection, request, repositories, work, previous, like)
    try:
        write_lock(selection, plan, inputs, work, repositories)
    except ResolutionError as error:
        if previous is None:
            explain_pins(plan, error, work)
        raise


def _current(path: Path, *, upgrade: bool) -> LockDirectory | None:
    """The lock that is there; None for none, or for one that cannot be read and is going to be replaced."""
    if not (path / record.RECORD_FILE).is_file():
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
