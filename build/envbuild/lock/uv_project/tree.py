"""The files of a uv project: a folder of this machine, and the commit that it is at."""

from __future__ import annotations

import contextlib
import io
import tarfile
import urllib.parse
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.catalog.catalog import Selection
from envbuild.catalog.models import KINDS
from envbuild.catalog.stack import UvProject
from envbuild.core.digests import sha256_file
from envbuild.core.errors import ConfigurationError, EnvbuildError
from envbuild.core.files import machine_errors
from envbuild.core.process import answer, find_tool
from envbuild.git.checkout import archive_of_commit
from envbuild.git.refs import Commit, CommitKind, GitRef
from envbuild.lock.context import LockContext, RunContext
from envbuild.lock.lockfile import LOCKFILES, PROJECT_FILE, UV_LOCK
from envbuild.lock.models import Lock, LockedProject
from envbuild.lock.uv.program import run_uv
from envbuild.lock.uv_project.settings import Pyproject, UvTable, parse_pyproject

# What envbuild writes where it works, which may be the project's own folder.
_OURS = (*(f"envs/{kind}" for kind in KINDS), LOCKFILES, "out")


@dataclass(frozen=True, kw_only=True)
class ProjectTree:
    """A project's files.

    Attributes:
        folder: of its pyproject.toml.
        top: of its repository; the project's own where it is in none.
        commit: the last that changed the project; None where it is in no repository.
        changed: files of the repository that are not as in the commit.
        git: the address of the repository; empty where it has none.
        ours: where envbuild writes its definitions, locks and images: no part of the project.
        is_copy: the folder is a copy, which builds may write into.
    """

    definition: UvProject
    folder: Path
    top: Path
    commit: Commit | None = None
    changed: tuple[str, ...] = ()
    git: str = ""
    ours: tuple[Path, ...] = ()
    is_copy: bool = False

    @cached_property
    def _pyproject(self) -> Pyproject:
        file = self.folder / PROJECT_FILE
        with machine_errors(file, "read"):
            text = file.read_text()
        try:
            return parse_pyproject(text)
        except ValueError as error:
            raise ConfigurationError(f"cannot understand {file}", why=str(error), fix="Correct it.") from error

    @property
    def name(self) -> str:
        """The project's name, as its pyproject.toml has it; that of its folder where it has none."""
        return canonicalize_name(self._pyproject.project.name or self.folder.name)

    @property
    def settings(self) -> UvTable:
        """Its ``[tool.uv]``."""
        return self._pyproject.tool.uv

    @property
    def indexes(self) -> dict[str, str]:
        """The addresses of its named indexes, but for the default one."""
        return {index.name: index.url for index in self.settings.index if index.name and not index.default}

    @property
    def title(self) -> str:
        """Which project it is, for people: its folder's name and commit."""
        dirty = " with changes" if self.changed else ""
        return f"{self.name} {self.commit.sha[:12]}{dirty}" if self.commit else self.name

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


def project_tree(definition: UvProject, above: Path, context: LockContext) -> ProjectTree:
    """The files of a project; those of a repository in a folder that goes with the context's.

    Args:
        above: the folder that has envs/.

    Raises:
        ConfigurationError: there is no such folder or ref, or it has no pyproject.toml.
        NetworkError: the repository cannot be reached.
        ResolutionError: it has no uv.lock, and does not resolve.
    """
    if definition.git is not None and definition.ref is not None:
        tree = _of_repository(definition, definition.git, definition.ref, context)
    else:
        tree = _of_folder(definition, above)
    if not (tree.folder / PROJECT_FILE).is_file():
        raise ConfigurationError(
            f"{definition.git or tree.folder} is no uv project",
            why=f"It has no {PROJECT_FILE}.",
            fix="Name a project: its folder, or the address of its repository and a branch, tag or commit (URL@REF).",
        )
    if (tree.folder / UV_LOCK).is_file():
        return tree
    with context.reporter.step(f"lock {tree.title} by uv, since it has no {UV_LOCK}"):
        run_uv(["lock"], what=f"lock {tree.title}", log=context.log, cwd=tree.folder, on_line=context.reporter.update)
    if tree.is_copy:
        return tree
    context.reporter.note(f"note: uv wrote {tree.folder / UV_LOCK}: commit it, so that the next lock is the same")
    return _of_folder(definition, above)


def moved_project(lock: Lock, selection: Selection, context: RunContext) -> str:
    """How the project of a stack is another one than when the lock was made; empty: it is the same."""
    definition, before = selection.stack.project, lock.project
    if definition is None or before is None:
        return ""  # the stack's own digest says so
    if definition.git is not None and definition.ref is not None:
        now = context.repositories.open(definition.git).resolve(GitRef(definition.ref)).sha
        return "" if now == before.commit else f"{definition.ref} of the project moved to {now[:12]}"
    tree = _of_folder(definition, selection.folder)
    if not (tree.folder / UV_LOCK).is_file():
        return f"{tree.folder} has no {UV_LOCK}"
    if tree.changed or tree.record() != before:
        return f"the project {tree.folder} is another one: {tree.title}"
    return ""


def _of_repository(definition: UvProject, url: str, ref: str, context: LockContext) -> ProjectTree:
    commit = context.repositories.open(url).resolve(GitRef(ref))
    name = url.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git")
    archive = archive_of_commit(name, url, commit.sha, context.store)
    folder = context.folder / "project"
    with machine_errors(folder), tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        # Git's own: no path leads out, and links stay as they are.
        tar.extractall(folder, filter="tar")
    top = folder / f"{name}-{commit.sha[:12]}"
    return ProjectTree(definition=definition, folder=top, top=top, commit=commit, git=url, is_copy=True)


def _without_user(address: str) -> str:
    """An address without the user and password that CI systems put there."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in ("http", "https"):
        return address if "://" in address or ":" in address else ""  # no folder of this machine
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _of_folder(definition: UvProject, above: Path) -> ProjectTree:
    folder = (above / (definition.path or "")).resolve()
    ours = tuple(above.resolve() / name for name in _OURS)

    def git(*words: str | Path) -> str:
        return answer([find_tool("git", "git"), "-C", folder, *words], what=f"look at the repository of {folder}")

    try:
        top = Path(git("rev-parse", "--show-toplevel").strip())
        # A lock that is committed next to the project would be old at once.
        others: list[str | Path] = ["--", top, *(f":(exclude){path}" for path in ours if path.is_relative_to(top))]
        last = git("log", "-1", "--no-show-signature", "--format=%H %ct", *others)
        sha, stamp = (last or git("show", "--no-patch", "--no-show-signature", "--format=%H %ct", "HEAD")).split()[-2:]
    except EnvbuildError:  # in no repository
        return ProjectTree(definition=definition, folder=folder, top=folder, ours=ours)
    committed_at = datetime.fromtimestamp(int(stamp), timezone.utc)
    address = ""
    with contextlib.suppress(EnvbuildError):
        address = _without_user(git("remote", "get-url", "origin").strip())
    return ProjectTree(
        definition=definition,
        folder=folder,
        top=top,
        commit=Commit(sha=sha, committed_at=committed_at, kind=CommitKind.COMMIT, name=sha),
        changed=tuple(line[3:] for line in git("status", "--porcelain", *others).splitlines()),
        git=address,
        ours=ours,
    )
