"""What a continuous integration asks of committed locks: are they still what their inputs give?"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.site import Site
from envbuild.core.errors import CheckRefusedError, ConfigurationError, EnvbuildError
from envbuild.core.progress import Reporter
from envbuild.lock.context import Repositories
from envbuild.lock.inputs.request import LockRequest, is_older
from envbuild.lock.locate import lock_path
from envbuild.lock.lock import LockResult, lock_stack, moved_branches
from envbuild.lock.lockfile import LOCKFILES, RECORD_FILE, read_lock
from envbuild.store.local import LocalStore

# uv resolves on one thread for most of the time and waits for the index for the rest.
LOCKS_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class CommittedLock:
    """A committed lock, and why it is not what its inputs give; nothing when it is.

    Attributes:
        changed: whether that is because it was changed after it was made, or damaged.
    """

    path: Path
    problem: str = ""
    changed: bool = False


def committed(project_dir: Path) -> list[Path]:
    """Every lock directory of a project."""
    return sorted(path.parent for path in (project_dir / LOCKFILES).glob(f"*/*/{RECORD_FILE}"))


def stack_of(path: Path) -> str | None:
    """The stack that a lock directory says it is of; None when its record cannot be read."""
    try:
        return read_lock(path).lock.stack
    except (CheckRefusedError, ConfigurationError):
        return None


def check(path: Path, catalog: Catalog, repositories: Repositories, reporter: Reporter) -> CommittedLock:
    """Whether a lock is whole, and made from its stack, base and request as they are now.

    Only for a lock that follows a branch is the network asked: where the branch is.

    Raises:
        NetworkError: a repository cannot be reached, so nothing can be said.
    """
    try:
        lock = read_lock(path).lock
    except CheckRefusedError as error:
        return CommittedLock(path=path, problem=f"{error.what}: {error.why}", changed=True)
    try:
        stack = catalog.stack(lock.stack)
        catalog.base(lock.base.name)
        target = next((entry.target for entry in stack.builds if lock.base.name in entry.bases), None)
        if target is None:
            return CommittedLock(
                path=path, problem=f"stack {lock.stack} is not meant for base {lock.base.name} any more"
            )
        selection = Selection(catalog, lock.stack, lock.base.name, target)
        if is_older(lock, selection):
            return CommittedLock(
                path=path,
                problem="the stack, the base, the known conflicts or the companions changed since it was made",
            )
        moved = moved_branches(lock, repositories, reporter)
        return CommittedLock(path=path, problem="; ".join(moved))
    except (CheckRefusedError, ConfigurationError) as error:
        return CommittedLock(path=path, problem=f"{error.what}: {error.why}")


def every_selection(catalog: Catalog) -> list[Selection]:
    """Each stack on each base that it names, once."""
    found: dict[tuple[str, str], Selection] = {}
    for name in catalog.names("stacks"):
        for builds in catalog.stack(name).builds:
            for base in builds.bases:
                found.setdefault((name, base), Selection(catalog, name, base, builds.target))
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one lock among many."""

    selection: Selection
    result: LockResult | None
    error: EnvbuildError | None


def lock_all(
    catalog: Catalog,
    project_dir: Path,
    *,
    site: Site,
    store: LocalStore,
    reporter_of: Callable[[Selection], Reporter],
    upgrade: bool,
) -> list[Outcome]:
    """Lock every stack on every base that it names; one that fails does not keep the others from it.

    Args:
        reporter_of: receives what happens to each lock; several are made at once.
    """

    def one(selection: Selection) -> Outcome:
        path = lock_path(project_dir, selection.stack_name, selection.base_name)
        try:
            result = lock_stack(
                selection,
                path=path,
                request=LockRequest(),
                site=site,
                store=store,
                reporter=reporter_of(selection),
                upgrade=upgrade,
            )
        except EnvbuildError as error:
            return Outcome(selection=selection, result=None, error=error)
        return Outcome(selection=selection, result=result, error=None)

    with ThreadPoolExecutor(LOCKS_AT_ONCE) as pool:
        return list(pool.map(one, every_selection(catalog)))
