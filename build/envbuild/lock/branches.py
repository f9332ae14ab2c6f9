"""The history of branches: whether anything changed that decides a lock."""

from __future__ import annotations

from envbuild.catalog import knowledge
from envbuild.core.errors import ConfigurationError, NetworkError
from envbuild.git.refs import GitRef
from envbuild.lock.components.project_metadata import PYPROJECT
from envbuild.lock.components.upstream import MANIFEST, SUBMODULE
from envbuild.lock.context import Repositories
from envbuild.lock.inputs.pins import GIT_PREFIX
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


def deciding_paths() -> tuple[str, ...]:
    """What decides what belongs to a commit; changes of anything else leave a lock as it is."""
    return (*DECIDING_PATHS, *knowledge.install_scripts().files)


def pins_stay(lock: Lock, repositories: Repositories) -> bool:
    """Whether the branches that a lock follows moved without a change of anything that decides it."""
    for part in lock.components.values():
        if not part.follows or part.git is None or part.commit is None:
            continue
        repository = repositories.open(part.git)
        try:
            tip = repository.resolve(GitRef(part.asked.removeprefix(GIT_PREFIX)))
            before = repository.resolve(GitRef(part.commit))
        except (ConfigurationError, NetworkError):
            return False  # of a branch that was rewritten, say; whoever makes the lock says what is wrong
        if repository.differ(before, tip, deciding_paths()):
            return False
    return True
