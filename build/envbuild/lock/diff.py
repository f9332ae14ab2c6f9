"""What resolving anew would change in a lock, or in every lock of a project (``envbuild lock --diff``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from envbuild.catalog.catalog import Catalog, HostDistribution, Selection, select_to_lock
from envbuild.catalog.context import Context
from envbuild.core.digests import Json
from envbuild.core.errors import ConfigurationError
from envbuild.core.text import shown
from envbuild.lock.committed import committed
from envbuild.lock.context import Repositories
from envbuild.lock.inputs.request import LockInputs, LockRequest, request_of
from envbuild.lock.locate import shipped_lock
from envbuild.lock.lockfile import LOCKFILES, RECORD_FILE, LockDirectory, read_lock
from envbuild.lock.make import new_lock
from envbuild.lock.record.difference import LockChange, compare, summary


@dataclass(frozen=True, kw_only=True)
class LockDifference:
    """What resolving anew would change in a lock.

    Attributes:
        new_digest: of the lock made anew, which is not kept.
    """

    old: LockDirectory
    new_digest: str
    changes: tuple[LockChange, ...]
    summary: str

    def as_json(self) -> dict[str, Json]:
        """The difference as ``--json`` prints it."""
        return {
            "path": str(self.old.path),
            "from": self.old.lock.digest,
            "to": self.new_digest,
            "changes": [
                {"name": item.name, "from": item.old, "to": item.new, "why": item.why, "component": item.component}
                for item in self.changes
            ],
        }

    def lines(self) -> list[str]:
        """For people."""
        return [self.summary, *[change.text() for change in self.changes]]


def diff_lock(selection: Selection, path: Path, request: LockRequest, context: Context) -> LockDifference:
    """Resolve a lock anew, and compare; nothing is written."""
    old = read_lock(path)
    repositories = Repositories(context.store, context.reporter)
    with new_lock(LockInputs.of(selection, request), old, repositories, context) as folder:
        new = read_lock(folder)
        changes = compare(old, new)
        return LockDifference(old=old, new_digest=new.lock.digest, changes=changes, summary=summary(old, new, changes))


def diff_own_or_shipped(selection: Selection, path: Path, request: LockRequest, context: Context) -> LockDifference:
    """:func:`diff_lock` with the project's lock ``path``, else with the one of that name that comes with envbuild."""
    shipped = shipped_lock(path.parent.name, path.name)
    if not (path / RECORD_FILE).is_file() and shipped is not None:
        context.reporter.note(f"note: {shown(path)} does not exist: compared with the lock that comes with envbuild")
        path = shipped
    return diff_lock(selection, path, request, context)


def diff_all(project_dir: Path, catalog: Catalog, base: str | None, context: Context) -> list[LockDifference]:
    """:func:`diff_lock` with each lock of a project, by its own request.

    Args:
        base: locks on this base alone; None: all.

    Raises:
        ConfigurationError: there is no lock.
    """
    paths = [path for path in committed(project_dir) if base in (None, path.name)]
    if not paths:
        raise ConfigurationError(
            "there is no lock to compare with",
            why=f"{project_dir / LOCKFILES} holds none.",
            fix="Make one first: envbuild lock --stack STACK; or name a stack whose lock comes with envbuild.",
        )
    found = []
    for path in paths:
        lock = read_lock(path).lock
        selection = select_to_lock(catalog, lock.stack, None, lock.base.name, HostDistribution.here())
        found.append(diff_lock(selection, path, request_of(lock), context))
    return found
