"""What every step of a lock needs: the context of the command, a folder, its log, and the git repositories."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.catalog.context import Context
from envbuild.core.files import machine_errors
from envbuild.core.progress import Reporter, SilentReporter
from envbuild.store.local import LocalStore

if TYPE_CHECKING:
    from envbuild.git.repository import GitRepository


class Repositories:
    """The git repositories of one run: the refs of each are listed once."""

    def __init__(self, store: LocalStore, reporter: Reporter) -> None:
        self._store = store
        self._reporter = reporter
        self._open: dict[str, GitRepository] = {}

    def quiet(self) -> Repositories:
        """The same for work next to other work: nothing is reported."""
        return Repositories(self._store, SilentReporter())

    def at(self, url: str) -> GitRepository:
        """The repository at ``url``."""
        # Slow to import, and most commands need no repository.
        from envbuild.git.client import GitSettings
        from envbuild.git.repository import GitRepository

        if url not in self._open:
            settings = GitSettings(log=self._store.root / "logs" / "git.log")
            self._open[url] = GitRepository(url, self._store, self._reporter, settings)
        return self._open[url]


def at_one_moment(context: Context) -> Context:
    """The context with its clock stopped: all attempts at a lock as of now are as of the first one's moment."""
    moment = context.clock()
    return replace(context, clock=lambda: moment)


@dataclass(frozen=True, kw_only=True)
class WorkContext(Context):
    """A context with a folder for throw-away projects and the log of the tools that run there.

    Attributes:
        most_seconds: how long one resolution may take, for what no lock depends on; None: as long as it does.
    """

    folder: Path
    log: Path
    most_seconds: float | None = None


@contextlib.contextmanager
def work_folder(context: Context, kind: str, label: str) -> Iterator[WorkContext]:
    """A folder in the store's staging area, which goes at the end, with the empty log ``label``.log."""
    log = context.store.root / "logs" / f"{label}.log"
    with context.store.staging(kind) as folder:
        with machine_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            # run() appends to a log (core/process.py): an earlier command's output would stay at its beginning.
            log.write_text("")
        # vars and not dataclasses.asdict, which makes deep copies of the values.
        yield WorkContext(**vars(context), folder=folder, log=log)


@dataclass(frozen=True, kw_only=True)
class LockContext(WorkContext):
    """A work context whose git repositories are listed once, for all steps of a lock."""

    repositories: Repositories
