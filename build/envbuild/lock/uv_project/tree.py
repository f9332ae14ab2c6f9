"""The files of a uv project: a folder of this machine, and the commit that it is at."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.catalog.stack import UvProject
from envbuild.core import tomlread
from envbuild.core.digests import sha256_file
from envbuild.core.errors import ConfigurationError, EnvbuildError
from envbuild.core.files import machine_errors
from envbuild.core.process import answer, find_tool
from envbuild.git.refs import Commit, CommitKind
from envbuild.lock.lockfile import PROJECT_FILE, UV_LOCK
from envbuild.lock.models import LockedProject


@dataclass(frozen=True, kw_only=True)
class ProjectTree:
    """A project's files.

    Attributes:
        folder: of its pyproject.toml.
        top: of its repository; the project's own where it is in none.
        commit: None where it is in no repository.
        changed: files of the repository that are not as in the commit.
        git: the address of the repository; empty where it has none.
    """

    definition: UvProject
    folder: Path
    top: Path
    commit: Commit | None = None
    changed: tuple[str, ...] = ()
    git: str = ""

    @property
    def name(self) -> str:
        """The project's name, as its pyproject.toml has it; that of its folder where it has none."""
        with machine_errors(self.folder, "read"):
            table = tomlread.table_at(tomlread.loads((self.folder / PROJECT_FILE).read_text()), "project")
        return canonicalize_name(str(table.get("name") or self.folder.name))

    @property
    def title(self) -> str:
        """Which project it is, for people: its folder's name and commit."""
        dirty = " with changes" if self.changed else ""
        return f"{self.folder.name} {self.commit.sha[:12]}{dirty}" if self.commit else self.folder.name

    def record(self) -> LockedProject:
        """What a lock states of it."""
        return LockedProject(
            git=self.git or None,
            commit=self.commit.sha if self.commit else None,
            dirty=bool(self.changed),
            uv_lock=sha256_file(self.folder / UV_LOCK),
            pyproject=sha256_file(self.folder / PROJECT_FILE),
            extras=self.definition.extras,
            groups=self.definition.groups,
        )


def project_tree(definition: UvProject, above: Path) -> ProjectTree:
    """The files of a project.

    Args:
        above: the folder that has envs/.

    Raises:
        ConfigurationError: there is no such folder, or it has no pyproject.toml.
    """
    folder = (above / (definition.path or "")).resolve()
    if not (folder / PROJECT_FILE).is_file():
        raise ConfigurationError(
            f"{folder} is no uv project",
            why=f"It has no {PROJECT_FILE}.",
            fix="Name the folder of a project, as seen from the folder that has envs/.",
        )
    return _of_folder(definition, folder)


def _of_folder(definition: UvProject, folder: Path) -> ProjectTree:
    def git(*words: str) -> str:
        return answer([find_tool("git", "git"), "-C", folder, *words], what=f"look at the repository of {folder}")

    try:
        sha, stamp = git("show", "--no-patch", "--no-show-signature", "--format=%H %ct", "HEAD").split()[-2:]
    except EnvbuildError:
        return ProjectTree(definition=definition, folder=folder, top=folder)
    committed_at = datetime.fromtimestamp(int(stamp), timezone.utc)
    address = ""
    with contextlib.suppress(EnvbuildError):
        address = git("remote", "get-url", "origin").strip()
    return ProjectTree(
        definition=definition,
        folder=folder,
        top=Path(git("rev-parse", "--show-toplevel").strip()),
        commit=Commit(sha=sha, committed_at=committed_at, kind=CommitKind.COMMIT, name=sha),
        changed=tuple(line[3:] for line in git("status", "--porcelain").splitlines()),
        git=address,
    )
