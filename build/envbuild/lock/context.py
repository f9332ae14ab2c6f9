"""What every step of a lock needs: the context of the command, a folder, its log, and the git repositories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.catalog.context import Context
from envbuild.core.progress import Reporter
from envbuild.store.local import LocalStore

if TYPE_CHECKING:
    from envbuild.git.repository import GitRepository


class Repositories:
    """The git repositories of one run: each is asked for its refs once."""

    def __init__(self, store: LocalStore, reporter: Reporter, *, offline: bool = False) -> None:
        self._store = store
        self._reporter = reporter
        self.offline = offline
        self._open: dict[str, GitRepository] = {}

    def at(self, url: str) -> GitRepository:
        """The repository at ``url``."""
        from envbuild.git.repository import GitRepository  # slow to import, and most commands ask no repository

        if url not in self._open:
            log = self._store.root / "logs" / "git.log"
            self._open[url] = GitRepository(url, self._store, self._reporter, offline=self.offline, log=log)
        return self._open[url]


@dataclass(frozen=True, kw_only=True)
class WorkContext(Context):
    """A context with a folder for throw-away projects and the log of the tools that run there."""

    folder: Path
    log: Path


@dataclass(frozen=True, kw_only=True)
class LockContext(WorkContext):
    """The context of one lock."""

    repositories: Repositories
