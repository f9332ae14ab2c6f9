"""Runs git on one bare repository: commands that talk to its server, and commands that cannot.

Everything goes through the git program, so git's own settings (``url.<base>.insteadOf``, credential helpers, proxies,
CA files) hold and no hosting service's API is needed.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.core.errors import MachineError, NetworkError
from envbuild.core.exit_status import mask, tail
from envbuild.core.process import Finished, ProcessOptions, find_tool, run, stream
from envbuild.core.progress import Reporter
from envbuild.core.text import quoted_command

REMOTE = "origin"
ATTEMPTS = 2
USAGE_STATUS = 129
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

# git's words for a repository or a ref that is not there, or may not be taken; a host asks for a user where it shows
# none to a stranger.
GONE = re.compile(
    r"not found|does not (appear to be|exist)|couldn't find remote ref|could not read Username|"
    r"transport '\S+' not allowed|unable to find remote helper",
    re.IGNORECASE,
)
_PROGRESS = re.compile(r"\d+% \(\d+/\d+\)|^remote: (Enumerating|Counting|Compressing|Total)\b")
# A server without an object that it may fetch from its own (git-upload-pack does not).
_PARTIAL = re.compile(r"could not fetch [0-9a-f]{40} from promisor remote")
# git has no status of its own for it: a server can refuse filters since git 2.29 (uploadpackfilter, git-config(1)).
_FILTER_REFUSED = re.compile(r"filter '.*' not supported")


@dataclass(frozen=True, kw_only=True)
class GitSettings:
    """How a repository is reached.

    Attributes:
        log: receives the output of fetches.
        answer_seconds: how long the server may take to list its refs.
        fetch_seconds: how long one fetch may take.
        pause_seconds: time between two attempts.
    """

    log: Path | None = None
    answer_seconds: float = 120.0
    fetch_seconds: float = 3600.0
    pause_seconds: float = 1.0


class GitClient:
    """Git commands on a mirror of ``url``."""

    def __init__(self, url: str, settings: GitSettings, reporter: Reporter) -> None:
        self.url = url
        self.settings = settings
        self._reporter = reporter

    def local(self, folder: Path, arguments: Sequence[str], what: str) -> str:
        """Run a command that needs the mirror in ``folder`` alone; returns its output.

        Raises:
            MachineError: git is missing, or the mirror is damaged.
        """
        options = ProcessOptions(
            env=_environment(network=False),
            error=MachineError,
            fix=_fix_of(folder),
            working_on=folder,
        )
        return run(_command(folder, arguments), what=what, options=options).output

    def contents(self, folder: Path, objects: Iterable[str]) -> dict[str, bytes]:
        """What these objects of the mirror in ``folder`` hold.

        Raises:
            MachineError: git is missing, or the mirror is damaged.
        """
        command, env = _command(folder, ["cat-file", "--batch", "--buffer"]), _environment(network=False)
        with tempfile.TemporaryFile() as names:
            names.write("".join(f"{name}\n" for name in objects).encode())
            names.seek(0)
            pieces = stream(
                command, what="read files", error=MachineError, fix=_fix_of(folder), env=env, stdin=names.fileno()
            )
            output = io.BytesIO(b"".join(pieces))
        contents = {}
        # NAME TYPE SIZE, the content, a line break; NAME missing (git-cat-file(1)).
        while header := output.readline().split():
            if len(header) != 3:
                raise MachineError(f"cannot read files: {folder} lacks {header[0].decode()}", fix=_fix_of(folder))
            contents[header[0].decode()] = output.read(int(header[2]))
            output.read(1)
        return contents

    def list_refs(self, folder: Path, arguments: Sequence[str], what: str) -> str:
        """The output of ``git ls-remote``.

        Raises:
            NetworkError: the server cannot be reached.
        """
        options = ProcessOptions(timeout_seconds=self.settings.answer_seconds)
        return self._talk(folder, ["ls-remote", *arguments], what, options)

    def fetch(self, folder: Path, arguments: Sequence[str], what: str, refspecs: Sequence[str]) -> bool:
        """Run ``git ... fetch --stdin``; False when the server refuses the filter.

        Raises:
            NetworkError: the server cannot be reached, or does not have what the refspecs name.
        """
        # On stdin: thousands of objects are more than a command line takes.
        stdin = "".join(f"{refspec}\n" for refspec in refspecs).encode()
        options = ProcessOptions(timeout_seconds=self.settings.fetch_seconds, stdin=stdin)
        try:
            self._talk(folder, arguments, what, options)
        except NetworkError as error:
            if _FILTER_REFUSED.search(error.why):
                return False
            raise
        return True

    def _talk(self, folder: Path, arguments: Sequence[str], what: str, options: ProcessOptions) -> str:
        """Run a command that talks to the server, once more if it fails: links drop."""
        fetches = options.stdin is not None
        options = replace(options, env=_environment(network=True), error=NetworkError, working_on=folder)
        started = time.monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            attempts = f"{attempt} time{'s' if attempt > 1 else ''}"
            try:
                finished = run(
                    _command(folder, arguments),
                    what=what,
                    # A list of refs is long and of little use.
                    log=self.settings.log if fetches else None,
                    on_line=self._reporter.update if fetches else None,
                    check=False,
                    options=options,
                )
            except NetworkError as error:
                cause = f"Tried {attempts} in {time.monotonic() - started:.0f} s\n{error}"
                raise self._unreachable(folder, what, cause) from error
            if finished.status == 0:
                return finished.output
            # 129 is git's own status for wrong usage: here an option that an older git does not know.
            if finished.status == USAGE_STATUS:
                raise MachineError(
                    f"cannot {what}: this git is too old",
                    why=tail(finished.output, lines=5),
                    # 2.29 brought `fetch --no-write-fetch-head`, by its release notes.
                    fix="Install git 2.29 or newer.",
                    log=self.settings.log,
                )
            cause = f"Tried {attempts} in {time.monotonic() - started:.0f} s\n{_message(finished)}"
            if _FILTER_REFUSED.search(finished.output):
                break
            if attempt < ATTEMPTS:
                time.sleep(self.settings.pause_seconds)
        raise self._unreachable(folder, what, cause)

    def _unreachable(self, folder: Path, what: str, cause: str) -> NetworkError:
        # --get-url applies url.<base>.insteadOf and talks to nobody (git-ls-remote(1)).
        address = self.local(folder, ["ls-remote", "--get-url", REMOTE], "ask git for the address").strip()
        rewritten = f"git's settings (url.<base>.insteadOf) turn it into {address}." if address != self.url else ""
        if _PARTIAL.search(cause):
            return NetworkError(
                f"cannot {what}: the repository is a partial clone, and lacks files",
                why=mask("\n".join(filter(None, (f"The repository is {self.url}", rewritten, cause)))),
                fix=f"Serve a whole one in its place: {quoted_command('git', 'clone', '--mirror', self.url)}",
                log=self.settings.log,
            )
        look = quoted_command("git", "ls-remote", self.url)
        error = NetworkError(
            f"cannot {what}",
            why=mask("\n".join(filter(None, (f"The repository is {self.url}", rewritten, cause)))),
            fix=f"Check whether `{look}` works here. git itself has the settings to reach it: "
            "rewriting (url.<base>.insteadOf), http.proxy or https_proxy, http.sslCAInfo, credential.helper (envbuild "
            "asks for no password), an ssh key.",
            log=self.settings.log,
        )
        error.gone = GONE.search(cause) is not None
        return error


def _fix_of(folder: Path) -> str:
    return f"If the mirror is damaged, remove {folder}: it is fetched again."


def _command(folder: Path, arguments: Sequence[str]) -> list[str | Path]:
    return [find_tool("git", "git"), "--git-dir", folder.absolute(), *arguments]


def _environment(*, network: bool) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in OTHER_REPOSITORY}
    # Never wait for a person; English messages; paths that hold '*' or ':' mean themselves.
    env |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_LITERAL_PATHSPECS": "1"}
    if not network:
        # Traces go to stderr, which is read together with the output.
        env = {name: value for name, value in env.items() if not name.startswith("GIT_TRACE")}
        # The first from git 2.45 on, the second for all: no transport is allowed, so nothing can be fetched.
        env |= {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    return env


def _message(finished: Finished) -> str:
    lines = [line for line in finished.output.splitlines() if line.strip() and not _PROGRESS.search(line)]
    return tail("\n".join(lines)) or f"git printed nothing (status {finished.status})"
