"""The files of a commit, and of its submodules, as an archive: fetched by git, and kept in the store."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

from envbuild.core.digests import digest_of
from envbuild.core.errors import NetworkError
from envbuild.core.exit_status import mask, tail
from envbuild.core.files import machine_errors
from envbuild.core.process import Finished, ProcessOptions, find_tool, run
from envbuild.git.client import OTHER_REPOSITORY
from envbuild.store.local import LocalStore

KIND = "git-trees"
TREE_FILE = "tree.tar"
TIME_LIMIT_SECONDS = 3600
# No large files, and no waiting for a password at a terminal.
_ENVIRONMENT = {"GIT_LFS_SKIP_SMUDGE": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def archive_of_commit(name: str, url: str, commit: str, store: LocalStore) -> bytes:
    """A tar archive with one folder on top: the files of a commit and of its submodules.

    git fetches them, so that its settings hold (rewriting, credentials). Kept in the store under the commit, which
    names its content; all files have the commit's time.

    Raises:
        NetworkError: git cannot fetch the commit or a submodule.
        MachineError: git is not installed.
    """
    key = digest_of({"commit": commit})

    def fetch(entry: Path) -> None:
        with store.staging("git-tree") as folder, store.reporter.step(f"fetch {name} at {commit[:12]}"):
            checkout = _Checkout(name, url, commit, folder / "tree", store.root / "logs" / "wheels" / "git.log")
            # Not `git clone`: before git 2.49 it takes branches and tags, and no commit.
            checkout.fetch()
            with machine_errors(entry), tarfile.open(entry / TREE_FILE, "w", format=tarfile.PAX_FORMAT) as tar:
                _add(tar, checkout.folder, f"{name}-{commit[:12]}", checkout.time())

    archive = (store.get_or_build(KIND, key, fetch).path / TREE_FILE).read_bytes()
    store.use(KIND, key)
    return archive


class _Checkout:
    def __init__(self, name: str, url: str, commit: str, folder: Path, log: Path) -> None:
        self._name, self._url, self._commit = name, url, commit
        self._log = log
        self.folder = folder

    def fetch(self) -> None:
        self.folder.mkdir()
        self._git("init", "--quiet")
        # Not every server gives out any commit by itself; then all branches and tags are fetched.
        if self._git("fetch", "--quiet", "--depth=1", self._url, self._commit, check=False).status != 0:
            self._git("fetch", "--quiet", self._url, "+refs/heads/*:refs/from/*", "+refs/tags/*:refs/tags/*")
        self._git("-c", "advice.detachedHead=false", "checkout", "--quiet", self._commit)
        if (self.folder / ".gitmodules").is_file():
            # Submodules with relative addresses are relative to the remote ``origin``.
            self._git("remote", "add", "origin", self._url)
            update = ("submodule", "--quiet", "update", "--init", "--recursive")
            # Shallow where the server gives out single commits: Megatron-Bridge has all of Megatron-LM as a submodule.
            if self._git(*update, "--depth=1", check=False).status != 0:
                self._git(*update)

    def time(self) -> int:
        """The commit's time, in seconds since the epoch."""
        # The number is the last word: warnings of git may stand before it, since both streams are read as one.
        return int(self._git("show", "--no-patch", "--format=%ct", self._commit).output.split()[-1])

    def _git(self, *arguments: str, check: bool = True) -> Finished:
        kept = {name: value for name, value in os.environ.items() if name not in OTHER_REPOSITORY}
        done = run(
            [find_tool("git", "git"), *arguments],
            what=f"fetch {self._name} at {self._commit[:12]}",
            log=self._log,
            check=False,
            options=ProcessOptions(
                env=kept | _ENVIRONMENT,
                cwd=self.folder,
                timeout_seconds=TIME_LIMIT_SECONDS,
                error=NetworkError,
                working_on=self.folder,
            ),
        )
        if check and done.status != 0:
            raise NetworkError(
                f"cannot fetch the sources of {self._name} at {self._commit[:12]}",
                why=mask(f"The repository is {self._url}. git {arguments[0]} printed:\n{tail(done.output)}"),
                fix=mask(
                    f"See whether `git ls-remote {self._url}` works here, and whether that commit is still there; "
                )
                + "git's own settings (url.<base>.insteadOf, credential.helper, http.proxy) hold.",
                log=self._log,
            )
        return done


def _add(tar: tarfile.TarFile, folder: Path, top: str, time: int) -> None:
    """All files below a folder but git's own, in the order of their names, owned by no particular account."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        # A folder at the top; in each submodule a file.
        if ".git" in relative.parts:
            continue
        member = tar.gettarinfo(path, f"{top}/{relative}")
        # A commit gives the same bytes on every machine and day: git has no times of files, accounts or groups.
        member.mtime, member.uid, member.gid, member.uname, member.gname = time, 0, 0, "", ""
        content = path.read_bytes() if member.isreg() else b""
        if member.islnk():  # tar's own idea of two names for one file
            member.type, content = tarfile.REGTYPE, path.read_bytes()
            member.size = len(content)
        tar.addfile(member, io.BytesIO(content) if content else None)
