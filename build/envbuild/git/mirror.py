"""A bare mirror of one git repository, without the contents of files: what it holds, and how the rest is fetched."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

from envbuild.core import locks
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import ConfigurationError
from envbuild.core.exit_status import mask
from envbuild.core.files import machine_errors
from envbuild.core.progress import Reporter
from envbuild.git.client import REMOTE, GitClient, GitSettings
from envbuild.git.refs import BRANCHES, GitRef, RemoteRefs, listed_commits
from envbuild.store.local import LocalStore

KIND = "git"
FILTER = "--filter=blob:none"
# The namespace of fetched tips, each named by its own commit: a branch that moves, is renamed or becomes a folder of
# branches never collides with what was fetched before.
TIPS = "refs/tips"
# Packs are kept as they come (unpackLimit): the mirror then has an object only with all that its pack completes, also
# after a kill. core.hooksPath of the user's settings would run hooks here.
CONFIGURATION = f"""
[core]
    repositoryformatversion = 1
    bare = true
    hooksPath = /dev/null
[extensions]
    partialClone = {REMOTE}
[fetch]
    unpackLimit = 1
[gc]
    auto = 0
[maintenance]
    auto = false
[remote "{REMOTE}"]
    promisor = true
    partialclonefilter = blob:none
    url = """
# git's own number for all of a history ("git fetch", --depth).
WHOLE_HISTORY = "--depth=2147483647"
FETCH = ("fetch", "--progress", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance")
# Files of a killed git that stop the next one or fill the disk.
LEFTOVERS = ("*.lock", "refs/**/*.lock", "objects/**/*.lock", "objects/**/tmp_*", "objects/pack/*.keep")
# 30 kB of names: far below what a command line takes.
BATCH = 500

_DEFAULT_BRANCH = re.compile(r"^ref: refs/heads/(.+)\tHEAD$", re.MULTILINE)
_HTTP_USER = re.compile(r"^https?://[^/@]+@")
_PASSWORD = re.compile(r"^[a-z+]+://[^/@:]*:[^/@]*@")

# The locks of mirrors into which threads of this process fetch.
_fetching: set[Path] = set()


class Mirror:
    """The mirror of ``url`` in the store, made when first needed; fetches are serialised by a lock file."""

    def __init__(self, url: str, store: LocalStore, reporter: Reporter, settings: GitSettings) -> None:
        self.url = _checked(url)
        self._git = GitClient(url, settings, reporter)
        self._store = store
        self._reporter = reporter
        self._key = sha256_bytes(url.encode())
        self._refs: RemoteRefs | None = None

    # Once: an entry that is gone later would be made under the lock that a fetch holds, and wait for itself.
    @cached_property
    def path(self) -> Path:
        """The bare repository; made now if need be, without talking to the server."""
        path = self._store.get_or_build(KIND, self._key, self._init).path
        with contextlib.suppress(OSError):  # a store that others own
            os.utime(path)  # `wheels prune` goes by the last use
        return path

    def _init(self, folder: Path) -> None:
        what = f"make a mirror of {self.url}"
        # GIT_DEFAULT_HASH and init.templateDir of the user would give another repository.
        self._git.local(folder, ["init", "--quiet", "--bare", "--template=", "--object-format=sha1"], what)
        # One file: `git config` is a process for each key. A value in quotes has these two escaped (git-config(1)).
        address = self.url.replace("\\", "\\\\").replace('"', '\\"')
        (folder / "config").write_text(f'{CONFIGURATION}"{address}"\n')

    def local(self, arguments: Sequence[str], what: str) -> str:
        """Run a git command that needs nothing but the mirror, and return its output.

        Raises:
            MachineError: git is missing, or the mirror is damaged.
        """
        return self._git.local(self.path, arguments, what)

    def contents(self, objects: set[str]) -> dict[str, bytes]:
        """What these files hold; what is missing is fetched.

        Raises:
            NetworkError: as for :meth:`fetch_objects`.
            MachineError: git is missing, or the mirror is damaged.
        """
        self.fetch_objects(objects, f"fetch {len(objects)} file{'s' if len(objects) > 1 else ''} of {self.url}")
        return self._git.contents(self.path, objects)

    def matching(self, prefixes: Iterable[str]) -> set[str]:
        """The objects in the mirror whose names begin with one of ``prefixes`` (a whole name: that object)."""
        objects: set[str] = set()
        names = list(prefixes)
        for start in range(0, len(names), BATCH):
            # The one command that looks for an object by name and, in a partial clone, does not try to fetch it.
            arguments = [f"--disambiguate={prefix}" for prefix in names[start : start + BATCH]]
            objects.update(self.local(["rev-parse", *arguments], "look for commits").split())
        return objects

    def refs(self) -> RemoteRefs:
        """The repository's branches and tags, listed once, so that one run sees one state.

        Raises:
            NetworkError: the server cannot be reached.
        """
        # A branch that moves while it is resolved would give two commits in one lock.
        if self._refs is None:
            # Called --branches from git 2.46 on, which still takes the old name; Debian 12 has 2.39.
            output = self._git.list_refs(self.path, ["--heads", "--tags", REMOTE], f"list the refs of {self.url}")
            self._refs = RemoteRefs.listed(output)
        return self._refs

    def tips(self, branches: Sequence[str]) -> dict[str, str]:
        """Where these branches are now, asked for by their names alone; a branch that is gone is left out.

        A name such as ``refs/pull/7/head`` is that of a ref of the host.

        Raises:
            NetworkError: the server cannot be reached.
        """
        what = f"find {', '.join(branches)} of {self.url}"
        names = {name: name if GitRef(name).is_of_the_host else f"{BRANCHES}{name}" for name in branches}
        listed = listed_commits(self._git.list_refs(self.path, [REMOTE, *names.values()], what))
        return {name: listed[whole] for name, whole in names.items() if whole in listed}

    def default_branch(self) -> str | None:
        """The branch that HEAD of the repository names; None without one.

        Raises:
            NetworkError: the server cannot be reached.
        """
        what = f"find the default branch of {self.url}"
        match = _DEFAULT_BRANCH.search(self._git.list_refs(self.path, ["--symref", REMOTE, "HEAD"], what))
        return match[1] if match else None

    def fetch_commits(self, commits: Iterable[str], what: str) -> None:
        """Fetch missing commits with their history and directories, without the contents of files.

        Raises:
            NetworkError: the server cannot be reached or does not have them.
        """

        def fetch(missing: set[str]) -> None:
            first = not self.local(["for-each-ref", "--count=1"], what).strip()
            # Without it git 2.39 looks for the missing parents of a shallow repository in a partial mirror, by a git
            # that looks for them too, and so on until the machine has no processes left.
            more = (WHOLE_HISTORY,) if self.is_shallow() else ()
            filtered = self._fetch([f"{commit}:{TIPS}/{commit}" for commit in sorted(missing)], what, more=more)
            # A server without uploadpack.allowFilter ignores the filter: git warns, and fetches everything.
            if filtered and first and not self._is_partial(min(missing)):
                self._reporter.note(f"{self.url} has no partial fetches: whole histories came, which takes longer")

        self._fetch_missing(set(commits), what, fetch)

    def fetch_objects(self, objects: Iterable[str], what: str) -> None:
        """Fetch missing objects by name, such as the contents of files.

        Raises:
            NetworkError: as for :meth:`fetch_commits`.
        """
        # As git itself fetches for a partial clone: nothing is offered, so nothing is left out as known.
        options = ("-c", "fetch.negotiationAlgorithm=noop")
        self._fetch_missing(set(objects), what, lambda missing: self._fetch(sorted(missing), what, options))

    def _fetch_missing(self, wanted: set[str], what: str, fetch: Callable[[set[str]], object]) -> None:
        # First without the lock: what is here needs no waiting for another process's fetch.
        if not wanted - self.matching(wanted):
            return
        lock = self._store.lock_of(KIND, self._key)

        def on_wait() -> None:
            # A thread of this command reports its fetch itself.
            if lock not in _fetching:
                self._reporter.note(f"waiting for another fetch from {self.url}")

        with locks.exclusive(lock, on_wait=on_wait), contextlib.ExitStack() as stack:
            _fetching.add(lock)
            stack.callback(_fetching.discard, lock)
            if missing := wanted - self.matching(wanted):
                self._remove_leftovers()
                with self._reporter.step(what):
                    fetch(missing)

    def is_shallow(self) -> bool:
        """Whether old commits are missing: in the mirror, or in the local repository that it is of."""
        address = self.local(["ls-remote", "--get-url", REMOTE], "ask git for the address").strip()
        folder = Path(address.removeprefix("file://"))
        return any((place / "shallow").is_file() for place in (self.path, folder, folder / ".git"))

    def _fetch(self, refspecs: Sequence[str], what: str, options: Sequence[str] = (), more: Sequence[str] = ()) -> bool:
        """Fetch; False when the server refuses the filter. One without filters ignores it."""
        arguments = [*options, *FETCH, *more, "--recurse-submodules=no", "--stdin"]
        if self._git.fetch(self.path, [*arguments, FILTER, REMOTE], what, refspecs):
            return True
        self._reporter.note(f"{self.url} refuses partial fetches: fetching whole histories, which takes longer")
        self._git.fetch(self.path, [*arguments, "--no-filter", REMOTE], what, refspecs)
        return False

    def _is_partial(self, commit: str) -> bool:
        """Whether the server left out files of ``commit``."""
        what = "look at the mirror"
        if self.local(["cat-file", "-t", commit], what).strip() not in ("commit", "tag"):
            return True
        # --missing=print writes a '?' in front of objects that are not here (git-rev-list(1)).
        listing = self.local(["rev-list", "--objects", "--no-walk", "--missing=print", commit], what)
        has_files = " blob " in self.local(["ls-tree", "-r", commit], what)
        return not has_files or any(line.startswith("?") for line in listing.splitlines())

    def _remove_leftovers(self) -> None:
        """Remove what a killed git left; no other process writes here while the lock is held."""
        with machine_errors(self.path):
            for pattern in LEFTOVERS:
                for path in self.path.glob(pattern):
                    path.unlink(missing_ok=True)


def _checked(url: str) -> str:
    if not url or url.startswith("-") or not url.isprintable():
        raise ConfigurationError(
            f"{url!r} is not an address of a git repository",
            why="It is empty, begins with '-', or holds control characters.",
            fix="Write one that `git ls-remote` takes, such as https://HOST/OWNER/NAME.",
        )
    if _HTTP_USER.search(url) or _PASSWORD.search(url):
        raise ConfigurationError(
            f"the address {mask(url)} holds a user name or password",
            why="It would be written into locks, logs and the cache.",
            fix="Leave it out, and let git find it: credential.helper, or ~/.netrc.",
        )
    return url
