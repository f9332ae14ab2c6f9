"""A bare, blobless mirror of one git repository: what of it is here, and how the rest comes.

Everything goes through the git program, so git's own settings (``url.<base>.insteadOf``, credential helpers, proxies,
CA files) hold and no hosting service's API is needed. There are two kinds of commands: those that talk to the server
(``ls-remote`` and ``fetch``, nothing else), and those that cannot, even where git would fetch a missing object unasked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from envbuild.core import locks
from envbuild.core.digests import sha256_bytes
from envbuild.core.errors import ConfigurationError, EnvbuildError, MachineError, NetworkError
from envbuild.core.exit_status import mask, tail
from envbuild.core.files import machine_errors, write_atomic
from envbuild.core.process import Finished, ProcessOptions, find_tool, run
from envbuild.core.progress import Reporter
from envbuild.store.local import LocalStore

KIND = "git"
REMOTE = "origin"
FILTER = "--filter=blob:none"
ATTEMPTS = 2
PAUSE_SECONDS = 1.0
USAGE_STATUS = 129
# The namespace of fetched tips, each named by its own commit: a branch that moves, is renamed or becomes a folder of
# branches never collides with what was fetched before.
TIPS = "refs/tips"
LISTING = "envbuild-refs.json"
SETTINGS = {
    "core.repositoryformatversion": "1",
    "extensions.partialClone": REMOTE,
    f"remote.{REMOTE}.promisor": "true",
    f"remote.{REMOTE}.partialclonefilter": "blob:none",
    # Packs are kept as they come: an object is then here only with all that its pack completes, also after a kill.
    "fetch.unpackLimit": "1",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "core.hooksPath": "/dev/null",
}
# `git rev-parse --local-env-vars` without the two that carry settings: set by git for its hooks and aliases, from which
# envbuild may be called, and about another repository.
OTHER_REPOSITORY = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_CONFIG",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_NO_REPLACE_OBJECTS",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_REPLACE_REF_BASE",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
)
# What a killed git leaves and the next one stumbles over, or that fills the disk.
LEFTOVERS = ("*.lock", "refs/**/*.lock", "objects/**/*.lock", "objects/**/tmp_*", "objects/pack/*.keep")
BATCH = 500

_LISTED = re.compile(r"^([0-9a-f]{40})\trefs/(heads|tags)/(.+?)(\^\{\})?$", re.MULTILINE)
_DEFAULT_BRANCH = re.compile(r"^ref: refs/heads/(.+)\tHEAD$", re.MULTILINE)
_PROGRESS = re.compile(r"\d+% \(\d+/\d+\)|^remote: (Enumerating|Counting|Compressing|Total)\b")
# git has no status of its own for it; the words are those of upload-pack since partial clones exist.
_FILTER_REFUSED = re.compile(r"filter '.*' not supported")
_HTTP_USER = re.compile(r"^https?://[^/@]+@")
_PASSWORD = re.compile(r"^[a-z+]+://[^/@:]*:[^/@]*@")


@dataclass(frozen=True)
class RemoteRefs:
    """The branches and tags of a repository: name to commit, tag objects peeled."""

    branches: Mapping[str, str]
    tags: Mapping[str, str]

    def tips(self) -> set[str]:
        """The commits that branches and tags point at."""
        return {*self.branches.values(), *self.tags.values()}


class Mirror:
    """The mirror of ``url`` in the store, made when first needed; fetches are serialised by a lock file.

    Args:
        offline: never talk to the server; what is not here is then a NetworkError.
        log: receives the output of fetches.
        answer_seconds: how long the list of refs may take.
        fetch_seconds: how long one fetch may take.
    """

    def __init__(
        self,
        url: str,
        store: LocalStore,
        reporter: Reporter,
        *,
        offline: bool,
        log: Path | None,
        answer_seconds: float,
        fetch_seconds: float,
    ) -> None:
        self.url = _checked(url)
        self.offline = offline
        self._store = store
        self._reporter = reporter
        self._log = log
        self._answer_seconds = answer_seconds
        self._fetch_seconds = fetch_seconds
        self._key = sha256_bytes(url.encode())
        self._refs: RemoteRefs | None = None

    @property
    def path(self) -> Path:
        """The bare repository; made here and now if need be, without talking to the server."""
        path = self._store.get_or_build(KIND, self._key, self._init).path
        with contextlib.suppress(OSError):  # a store that others own
            os.utime(path)  # `wheels prune` goes by the last use
        return path

    def _init(self, folder: Path) -> None:
        what = f"make a mirror of {self.url}"
        self._run(folder, ["init", "--quiet", "--bare", "--template=", "--object-format=sha1"], what)
        for name, value in {f"remote.{REMOTE}.url": self.url, **SETTINGS}.items():
            self._run(folder, ["config", name, value], what)

    def local(self, arguments: Sequence[str], what: str, *, cwd: Path | None = None) -> str:
        """Run a git command that needs nothing but the mirror, and return what it prints.

        Raises:
            MachineError: git is missing, or the mirror is damaged.
        """
        return self._run(self.path, arguments, what, cwd=cwd).output

    def _run(self, folder: Path, arguments: Sequence[str], what: str, *, cwd: Path | None = None) -> Finished:
        return run(
            [find_tool("git", "git"), "--git-dir", folder.absolute(), *arguments],
            what=what,
            options=ProcessOptions(
                env=_environment(network=False),
                cwd=cwd,
                error=MachineError,
                fix=f"If the mirror is damaged, remove {folder}: it is fetched again.",
                working_on=folder,
            ),
        )

    def matching(self, prefixes: Iterable[str]) -> set[str]:
        """The objects that are here and whose names begin with one of ``prefixes`` (a whole name: that object)."""
        found: set[str] = set()
        asked = list(prefixes)
        for start in range(0, len(asked), BATCH):
            # The one command that looks for an object by name and, in a partial clone, does not try to fetch it.
            words = [f"--disambiguate={prefix}" for prefix in asked[start : start + BATCH]]
            found.update(self.local(["rev-parse", *words], "look for commits").split())
        return found

    def refs(self) -> RemoteRefs:
        """The repository's branches and tags: asked once, so that one run sees one state; offline the last ones seen.

        Raises:
            NetworkError: the server cannot be reached; or offline, and no run has ever reached it.
        """
        if self._refs is None:
            if self.offline:
                self._refs = self._kept_refs()
            else:
                arguments = ["ls-remote", "--heads", "--tags", REMOTE]
                answer = self._talk(arguments, f"list the refs of {self.url}", seconds=self._answer_seconds)
                self._refs = _listed(answer.output)
                listing = {"branches": self._refs.branches, "tags": self._refs.tags}
                write_atomic(self.path / LISTING, json.dumps(listing))
        return self._refs

    def default_branch(self) -> str | None:
        """The branch that HEAD of the repository names; None: none.

        Raises:
            NetworkError: the server cannot be reached, or may not be asked.
        """
        what = f"ask which is the default branch of {self.url}"
        if self.offline:
            raise self._offline(what, "That is not kept.")
        answer = self._talk(["ls-remote", "--symref", REMOTE, "HEAD"], what, seconds=self._answer_seconds)
        found = _DEFAULT_BRANCH.search(answer.output)
        return found[1] if found else None

    def last_refs(self) -> RemoteRefs | None:
        """The branches and tags seen last, without asking; None when nobody ever asked."""
        try:
            return self._refs or RemoteRefs(**json.loads((self.path / LISTING).read_text()))
        except FileNotFoundError:
            return None

    def _kept_refs(self) -> RemoteRefs:
        refs = self.last_refs()
        if refs is None:
            raise self._offline(f"list the refs of {self.url}", "No earlier run has kept the list.")
        seen = datetime.fromtimestamp((self.path / LISTING).stat().st_mtime, timezone.utc)
        self._reporter.note(f"offline: branches and tags of {self.url} as seen at {seen:%Y-%m-%d %H:%M} UTC")
        return refs

    def fetch_commits(self, commits: Iterable[str], what: str) -> None:
        """Bring commits with their history and directories, without the files' contents; those here cost nothing.

        Raises:
            NetworkError: the server cannot be reached or does not have them; or offline, and one is not here.
        """
        wanted = set(commits)

        def fetch(missing: set[str]) -> None:
            first = not self.local(["for-each-ref", "--count=1"], what).strip()
            filtered = self._fetch([f"{commit}:{TIPS}/{commit}" for commit in sorted(missing)], what)
            if filtered and first and not self._is_partial(min(missing)):
                self._reporter.note(f"{self.url} knows no partial fetches: whole histories came, which takes longer")

        self._fetch_missing(wanted, what, fetch)

    def fetch_objects(self, objects: Iterable[str], what: str) -> None:
        """Bring single objects, such as the contents of files; those here cost nothing.

        Raises:
            NetworkError: as for :meth:`fetch_commits`.
        """
        # As git itself fetches for a partial clone: nothing is offered, so nothing is left out as known.
        options = ("-c", "fetch.negotiationAlgorithm=noop")
        self._fetch_missing(set(objects), what, lambda missing: self._fetch(sorted(missing), what, options))

    def _fetch_missing(self, wanted: set[str], what: str, fetch: Callable[[set[str]], object]) -> None:
        if not wanted - self.matching(wanted):
            return
        if self.offline:
            raise self._offline(what, "The mirror in the cache does not hold it.")
        lock = self._store.root / "locks" / f"{KIND}-{self.path.name}.lock"
        waiting = f"another envbuild is fetching from {self.url}: waiting for it"
        with locks.exclusive(lock, on_wait=lambda: self._reporter.note(waiting)):
            if missing := wanted - self.matching(wanted):
                self._sweep()
                with self._reporter.step(what):
                    fetch(missing)

    def _fetch(self, refspecs: Sequence[str], what: str, options: Sequence[str] = ()) -> bool:
        """Fetch, and return whether the server took the filter or, as servers do that know none, passed over it."""
        arguments = [*options, "fetch", "--progress", "--no-tags", "--no-write-fetch-head"]
        arguments += ["--no-auto-maintenance", "--recurse-submodules=no", "--stdin"]
        stdin = "".join(f"{refspec}\n" for refspec in refspecs).encode()
        try:
            self._talk([*arguments, FILTER, REMOTE], what, seconds=self._fetch_seconds, stdin=stdin)
        except NetworkError as error:
            if not _FILTER_REFUSED.search(error.why):
                raise
        else:
            return True
        self._reporter.note(f"{self.url} refuses partial fetches: fetching whole histories, which takes longer")
        self._talk([*arguments, "--no-filter", REMOTE], what, seconds=self._fetch_seconds, stdin=stdin)
        return False

    def _is_partial(self, commit: str) -> bool:
        """Whether files of ``commit`` are missing here, as they are when the server left them out."""
        if self.local(["cat-file", "-t", commit], "look at the mirror").strip() not in ("commit", "tag"):
            return True
        listing = self.local(["rev-list", "--objects", "--no-walk", "--missing=print", commit], "look at the mirror")
        has_files = " blob " in self.local(["ls-tree", "-r", commit], "look at the mirror")
        return not has_files or any(line.startswith("?") for line in listing.splitlines())

    def _sweep(self) -> None:
        """Remove what a killed git left; nobody else writes here while the lock is held."""
        with machine_errors(self.path):
            for pattern in LEFTOVERS:
                for path in self.path.glob(pattern):
                    path.unlink(missing_ok=True)

    def _talk(self, arguments: Sequence[str], what: str, *, seconds: float, stdin: bytes | None = None) -> Finished:
        """Run a git command that talks to the server, once more if it fails: links drop."""
        command: list[str | Path] = [find_tool("git", "git"), "--git-dir", self.path.absolute(), *arguments]
        fetches = "fetch" in arguments
        log = self._log if fetches else None  # a list of refs is long and says little
        started = time.monotonic()
        tried = 0
        while True:
            tried += 1
            try:
                finished = run(
                    command,
                    what=what,
                    log=log,
                    on_line=self._reporter.update if fetches else None,
                    check=False,
                    options=ProcessOptions(
                        env=_environment(network=True),
                        timeout_seconds=seconds,
                        stdin=stdin,
                        error=NetworkError,
                        working_on=self.path,
                    ),
                )
            except NetworkError as error:
                raise self._unreachable(what, arguments, tried, started, str(error)) from error
            if finished.status == 0:
                return finished
            if finished.status == USAGE_STATUS:
                raise MachineError(
                    f"cannot {what}: this git is too old",
                    why=tail(finished.output, lines=5),
                    fix="Install git 2.29 or newer.",
                    log=self._log,
                )
            if tried == ATTEMPTS or _FILTER_REFUSED.search(finished.output):
                raise self._unreachable(what, arguments, tried, started, _said(finished))
            time.sleep(PAUSE_SECONDS)

    def _unreachable(self, what: str, arguments: Sequence[str], tried: int, started: float, said: str) -> NetworkError:
        taken = self.local(["ls-remote", "--get-url", REMOTE], "ask git for the address").strip()
        address = f"git's settings (url.<base>.insteadOf) turn it into {taken}." if taken != self.url else ""
        words = " ".join(word for word in arguments if not word.startswith("-") and word != REMOTE)
        times = "once" if tried == 1 else f"{tried} times"
        attempts = f"Tried {times} in {time.monotonic() - started:.0f} s: git {words} {self.url}"
        return NetworkError(
            f"cannot {what}",
            why=mask("\n".join(filter(None, (f"The repository is {self.url}", address, attempts, said)))),
            fix=f"See whether `git ls-remote {self.url}` works here. What git needs to reach it is set in git itself: "
            "rewriting (url.<base>.insteadOf), http.proxy or https_proxy, http.sslCAInfo, credential.helper (envbuild "
            "asks for no password), an ssh key.",
            log=self._log,
        )

    def _offline(self, what: str, why: str) -> EnvbuildError:
        return NetworkError(
            f"cannot {what}: working offline",
            why=f"{why} The repository is {self.url}",
            fix="Run once without --offline; then the same commits are found without a network.",
        )


def _checked(url: str) -> str:
    if not url or url.startswith("-") or not url.isprintable():
        raise ConfigurationError(
            f"{url!r} is no address of a git repository",
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


def _environment(*, network: bool) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in OTHER_REPOSITORY}
    # Never wait for a person; English messages; paths that hold '*' or ':' mean themselves.
    env |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_LITERAL_PATHSPECS": "1"}
    if not network:
        env = {name: value for name, value in env.items() if not name.startswith("GIT_TRACE")}
        # The first from git 2.45 on, the second for all: no transport is allowed, so nothing can be fetched.
        env |= {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    return env


def _listed(output: str) -> RemoteRefs:
    found: dict[str, dict[str, str]] = {"heads": {}, "tags": {}}
    for commit, kind, name, peeled in _LISTED.findall(output):
        if peeled or name not in found[kind]:
            found[kind][name] = commit
    return RemoteRefs(branches=found["heads"], tags=found["tags"])


def _said(finished: Finished) -> str:
    lines = [line for line in finished.output.splitlines() if line.strip() and not _PROGRESS.search(line)]
    return tail("\n".join(lines)) or f"git printed nothing (status {finished.status})"
