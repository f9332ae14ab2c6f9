"""The history of branches: what a lock may fall back to, and whether anything changed that decides one."""

from __future__ import annotations

from collections.abc import Sequence

from envbuild.catalog import knowledge
from envbuild.core.errors import ConfigurationError, EnvbuildError, NetworkError
from envbuild.git.refs import Commit, CommitKind, GitRef
from envbuild.git.repository import GitRepository
from envbuild.lock.components.models import Chosen
from envbuild.lock.components.project_metadata import PYPROJECT
from envbuild.lock.components.upstream import MANIFEST, SUBMODULE
from envbuild.lock.context import Repositories
from envbuild.lock.inputs.pins import GIT_PREFIX
from envbuild.lock.make import LockProgress
from envbuild.lock.models import Lock

# Besides upstream's install scripts.
DECIDING_PATHS = (
    MANIFEST,
    "requirements",
    PYPROJECT,
    "uv.lock",
    "setup.py",
    "setup.cfg",
    SUBMODULE,
    ".gitmodules",
    "docker",
)
# Where trees have their packages.
FOLDERS = ("", "src/")
# Changes that are looked back over.
MOST_CHANGES = 40
# And of the files that fail at the tip: what changed them before that seldom matters.
MOST_OF_FILES = 2


def deciding_paths() -> tuple[str, ...]:
    """What decides what belongs to a commit; changes of anything else leave a lock as it is."""
    return (*DECIDING_PATHS, *knowledge.install_scripts().files)


def leading(steps: LockProgress, error: EnvbuildError) -> Chosen | None:
    """The component whose branch leads, where its tip is followed; None: nothing to go back on.

    Of several that one whose upstream a failure is about, else the first.
    """
    followed = [item for item in steps.leading if item.commit is not None and item.commit.kind is CommitKind.BRANCH]
    named = [item for item in followed if item.name in error.packages]
    return next(iter([*named, *followed]), None)


def older_commits(tip: Commit, repository: GitRepository, files: Sequence[str]) -> list[Commit]:
    """The commits before each change of what decides a lock, and before the last ones of files, newest first.

    Args:
        files: where what blocks the tip shows, as they are named in their packages.
    """
    found = repository.before_changes(tip, deciding_paths(), MOST_CHANGES)
    if files:
        # git takes paths literally here.
        paths = [f"{folder}{file}" for folder in FOLDERS for file in files]
        found += repository.before_changes(tip, paths, MOST_OF_FILES)
    commits = {commit.sha: commit for commit in found}.values()
    return sorted(commits, key=lambda commit: commit.committed_at, reverse=True)


def has_same_file(file: str, tip: Commit, older: Commit, repository: GitRepository) -> bool:
    """Whether a file of a package is there at the tip, and was the same at an older commit."""
    paths = [f"{folder}{file}" for folder in FOLDERS]
    texts = repository.read_files(tip, paths)
    return any(texts.values()) and texts == repository.read_files(older, paths)


def pins_stay(lock: Lock, repositories: Repositories) -> bool:
    """Whether the branches that a lock follows moved without a change of anything that decides it."""
    # With an older commit than the tip, what blocked the tip may be gone.
    if lock.behind:
        return False
    for item in lock.components.values():
        if not item.follows or item.git is None or item.commit is None:
            continue
        repository = repositories.at(item.git)
        try:
            tip = repository.resolve(GitRef(item.asked.removeprefix(GIT_PREFIX)))
            before = repository.resolve(GitRef(item.commit))
        except (ConfigurationError, NetworkError):
            return False  # of a branch that was rewritten, say; whoever makes the lock says what is wrong
        if repository.differ(before, tip, deciding_paths()):
            return False
    return True
