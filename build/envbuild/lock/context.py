"""What every step of a lock needs: the context of the command, the git repositories, a folder and its log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import Self

from envbuild.catalog.context import Context
from envbuild.core.errors import ResolutionError
from envbuild.core.files import machine_errors
from envbuild.core.progress import Reporter, SilentReporter
from envbuild.lock.uv_lock import Packages
from envbuild.store.local import LocalStore

if TYPE_CHECKING:
    from envbuild.git.repository import GitRepository

AnyRun = TypeVar("AnyRun", bound="RunContext")


class Repositories:
    """The git repositories of one run: the refs of each are listed once."""

    def __init__(self, store: LocalStore, reporter: Reporter) -> None:
        self._store = store
        self._reporter = reporter
        self._open: dict[str, GitRepository] = {}

    def quiet(self) -> Repositories:
        """The same for work next to other work: nothing is reported."""
        return Repositories(self._store, SilentReporter())

    def open(self, url: str) -> GitRepository:
        """The repository at ``url``."""
        # Slow to import, and most commands need no repository.
        from envbuild.git.client import GitSettings
        from envbuild.git.repository import GitRepository

        if url not in self._open:
            settings = GitSettings(log=self._store.root / "logs" / "git.log")
            self._open[url] = GitRepository(url, self._store, self._reporter, settings)
        return self._open[url]


@dataclass(frozen=True, kw_only=True)
class RunContext(Context):
    """The context of a run, in which the same question has one answer.

    Attributes:
        answers: what uv said of releases, by question.
    """

    repositories: Repositories
    answers: dict[str, Packages | ResolutionError] = field(default_factory=dict)

    def quiet(self) -> Self:
        """The same for work next to other work: nothing is reported."""
        return replace(self, reporter=SilentReporter(), repositories=self.repositories.quiet())


def run_context(context: Context) -> RunContext:
    """The context with its clock stopped: all attempts at a lock as of now are as of the first one's moment."""
    moment = context.clock()
    repositories = Repositories(context.store, context.reporter)
    return RunContext(**{**vars(context), "clock": lambda: moment}, repositories=repositories)


@dataclass(frozen=True, kw_only=True)
class LockContext(RunContext):
    """A run's context with a folder for throw-away projects and the log of the tools that run there.

    Attributes:
        most_seconds: how long one resolution may take, for what no lock depends on; None: as long as it does.
    """

    folder: Path
    log: Path
    most_seconds: float | None = None


@contextlib.contextmanager
def work_folder(context: RunContext, kind: str, label: str) -> Iterator[LockContext]:
    """A folder in the store's staging area, which goes at the end, with the empty log ``label``.log."""
    log = context.store.root / "logs" / f"{label}.log"
    with context.store.staging(kind) as folder:
        with machine_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            # run() appends to a log (core/process.py): an earlier command's output would stay at its beginning.
            log.write_text("")
        # vars and not dataclasses.asdict, which makes deep copies of the values.
        yield LockContext(**vars(context), folder=folder, log=log)
