"""The commits of the leading component's branch that a lock may fall back to, newest first."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.utils import canonicalize_name

from envbuild.core.errors import EnvbuildError
from envbuild.git.refs import Commit, CommitKind
from envbuild.git.repository import GitRepository
from envbuild.lock.components.install_scripts import SCRIPTS
from envbuild.lock.components.models import Chosen
from envbuild.lock.components.upstream import MANIFEST, PYPROJECT, SUBMODULE
from envbuild.lock.make import Steps

# What decides what belongs to a commit: changes of anything else leave a lock as it is.
DECIDING_PATHS = (
    MANIFEST,
    "requirements",
    PYPROJECT,
    "uv.lock",
    "setup.py",
    "setup.cfg",
    SUBMODULE,
    "docker",
    *SCRIPTS,
)
# Changes that are looked back over.
MOST_CHANGES = 40


def leading(steps: Steps, error: EnvbuildError) -> Chosen | None:
    """The component whose branch leads, where its tip is followed; None: nothing to go back on.

    Of several that one whose upstream a failure is about, else the first.
    """
    followed = [
        item
        for item in steps.leading
        if item.commit is not None and item.commit.kind is CommitKind.BRANCH and item.git is not None
    ]
    named = [item for item in followed if canonicalize_name(item.name) in error.packages]
    return next(iter([*named, *followed]), None)


def older_commits(lead: Chosen, repository: GitRepository) -> Iterator[Commit]:
    """The commits before each change of what decides a lock, newest first."""
    if lead.commit is not None:
        yield from repository.before_changes(lead.head or lead.commit, DECIDING_PATHS, MOST_CHANGES)
