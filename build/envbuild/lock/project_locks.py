"""The locks of a project: are they still what their inputs give (``envbuild lock --check``), and all of them made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.catalog.catalog import Catalog, Selection
from envbuild.catalog.context import Context
from envbuild.core.background import interruptible
from envbuild.core.errors import CheckRefusedError, ConfigurationError, EnvbuildError
from envbuild.core.progress import Reporter
from envbuild.core.text import shown
from envbuild.lock.context import RunContext, run_context
from envbuild.lock.existing import moved_branches
from envbuild.lock.inputs.request import LockRequest, is_older
from envbuild.lock.lock import LockOptions, LockResult, lock_stack
from envbuild.lock.lockdir import lock_path
from envbuild.lock.lockfile import LOCKFILES, RECORD_FILE, read_lock


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


def _stack_of(path: Path) -> str | None:
    """The stack of a lock directory; None when its record cannot be read."""
    try:
        return read_lock(path).lock.stack
    except (CheckRefusedError, ConfigurationError):
        return None


def check_committed(
    project_dir: Path, catalog: Catalog, context: Context, *, stack: str | None, base: str | None, name: str | None
) -> list[Path]:
    """Check the locks of a project, or those of a stack, on a base, or of a name; returns which were checked.

    Raises:
        ConfigurationError: there is no such lock.
        CheckRefusedError: some are not what their inputs give.
        NetworkError: a repository cannot be reached, so that nothing is known.
    """
    paths = [
        path
        for path in committed(project_dir)
        # By its folder too: a record that is damaged does not say of which stack it is.
        if (stack is None or stack in (path.parent.name, _stack_of(path)))
        and (base is None or path.name == base)
        and (name is None or path.parent.name == name)
    ]
    if not paths:
        raise ConfigurationError(
            "there is no lock to check",
            why=f"{project_dir / LOCKFILES} holds none" + (f" of {stack}." if stack else ".") + "\n"
            "Locks that come with envbuild are meant for use and not checked here: whatever takes one refuses it where "
            "it was made from other definitions.",
            fix="Make one first: envbuild lock --stack STACK; --diff shows what it would change.",
        )
    run = run_context(context)
    results = [check_one(path, catalog, run) for path in paths]
    old = [result for result in results if result.problem]
    if old:
        raise CheckRefusedError(
            f"{len(old)} of {len(results)} locks are out of date or were edited",
            why="\n".join(f"{shown(result.path)}: {result.problem}" for result in old),
            fix="\n".join(_how_to_correct(old)),
        )
    return paths


def _how_to_correct(locks: list[CommittedLock]) -> Iterator[str]:
    if any(not lock.changed for lock in locks):
        yield "Lock them again (envbuild lock --stack STACK --base BASE), review the difference, and commit it."
    if changed := [shown(lock.path) for lock in locks if lock.changed]:
        yield (
            f"Changed or damaged after it was made: {', '.join(changed)}. Restore it from version control, or make it "
            "anew: the `envbuild lock` command that it is from, with --upgrade (without it, it is refused)."
        )


def check_one(path: Path, catalog: Catalog, context: RunContext) -> CommittedLock:
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
        # Any of them: a lock depends on the base, and not on the GPU.
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
        moved = moved_branches(lock, context)
        if stack.project is not None:
            from envbuild.lock.uv_project.tree import moved_project  # slow to import

            moved += filter(None, [moved_project(lock, selection, context)])
        return CommittedLock(path=path, problem="; ".join(moved))
    except (CheckRefusedError, ConfigurationError) as error:
        return CommittedLock(path=path, problem=f"{error.what}: {error.why}")


# uv resolves on one thread for most of the time and waits for the index for the rest.
LOCKS_AT_ONCE = 2


def every_selection(catalog: Catalog) -> list[Selection]:
    """Each stack on each base that it names, once."""
    by_name: dict[tuple[str, str], Selection] = {}
    for name in catalog.names("stacks"):
        for builds in catalog.stack(name).builds:
            for base in builds.bases:
                by_name.setdefault((name, base), Selection(catalog, name, base, builds.target))
    return list(by_name.values())


def lock_all(
    catalog: Catalog,
    project_dir: Path,
    context: Context,
    reporter_of: Callable[[Selection], Reporter],
    *,
    upgrade: bool,
) -> list[LockResult]:
    """Lock every stack on every base that it names; one that fails does not keep the others from it.

    Args:
        reporter_of: receives what happens to each lock; several are made at once.

    Raises:
        EnvbuildError: some failed; of the class of the first failure.
    """

    def locked(selection: Selection) -> LockResult | EnvbuildError:
        path = lock_path(project_dir, selection.stack_name, selection.base_name)
        own = replace(context, reporter=reporter_of(selection))
        try:
            # base_named by default: every base is meant, and none gives way to another.
            return lock_stack(selection, LockRequest(), LockOptions(path=path, upgrade=upgrade), own)
        except EnvbuildError as error:
            return error

    selections = every_selection(catalog)
    with interruptible(LOCKS_AT_ONCE) as pool:
        outcomes = list(pool.map(locked, selections))
    pairs = zip(selections, outcomes, strict=True)
    failed = [(selection, error) for selection, error in pairs if isinstance(error, EnvbuildError)]
    if failed:
        first = failed[0][1]
        raise first.with_context(
            what=f"{len(failed)} of {len(outcomes)} locks failed",
            why="\n".join(
                f"{selection.stack_name} on {selection.base_name}: {error.what}\n{error.why}"
                for selection, error in failed
            ),
        ) from first
    return [outcome for outcome in outcomes if isinstance(outcome, LockResult)]
