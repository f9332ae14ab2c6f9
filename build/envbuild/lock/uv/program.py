"""The uv program, and what its failures mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.core.errors import (
    CheckRefusedError,
    ConfigurationError,
    EnvbuildError,
    MachineError,
    NetworkError,
    ResolutionError,
    disk_full,
)
from envbuild.core.exit_status import describe_status, full_disk, ran_out_of_space, shortage, tail
from envbuild.core.process import Finished, ProcessOptions, answer, run
from envbuild.git.client import GONE
from envbuild.lock.uv.interpreter import behind_a_shim, minor_of_project, pyenv_python
from envbuild.lock.uv.named_index import NO_RELEASE, isolated_build_error
from envbuild.lock.uv.settings import resolving_uv

# uv 0.13 has no machine-readable errors; these phrases are its own words for "could not be reached".
_NETWORK = re.compile(
    r"Failed to fetch|error sending request|dns error|Connection refused|network was disabled|"
    r"operation timed out|lack of valid authentication credentials|tls handshake|invalid peer certificate",
    re.IGNORECASE,
)
# And for an index that answered something else than pages and files: a proxy's page, a mirror's error.
_BAD_ANSWER = re.compile(r"Received some unexpected|Unsupported `Content-Type`|Hash mismatch for package metadata")
_GIT = re.compile(r"Git operation failed")
# git's words for a commit that a server does not have, and uv's for which. Server and client write to one stream, and
# may write into each other's lines.
_NO_COMMIT = re.compile(r"not our ref|unadvertised object")
_COMMIT = re.compile(r"failed to fetch commit `([0-9a-f]{12})")
# The archive's name is in whatever uv writes of a Python that it could not download: of the connection, of a mirror
# without it, of a file that is cut off.
_NO_INTERPRETER = re.compile(
    r"No interpreter found for|Failed to inspect Python interpreter|python downloads json|cpython-3\S*-install_only"
)
_WANTED_PYTHON = re.compile(r"(?:for Python [=~]*|cpython-|/python)(3\.\d+)")
# One unknown [tool.uv] key is only a warning, after which uv drops other settings too.
# Seen with uv 0.13.8: `exclude-newer` was gone from uv.lock, and the exit status was 0.
_DROPPED_SETTINGS = re.compile(r"Failed to parse `.*pyproject\.toml` during settings discovery|unknown field")
KNOW_THE_KEYS = "Use the uv that envbuild pins: another one does not know a key of [tool.uv] that envbuild writes."
# uv's words; below them is what the build itself printed.
_NOT_BUILT = re.compile(r"Failed to (?:download and )?build `([A-Za-z0-9._-]+)")
# Of a build that needs a package which no isolated build may take (never_in_builds).
_NEVER_IN_BUILDS = re.compile(rf"(?:you require|depends on) ([A-Za-z0-9._-]+){NO_RELEASE}, which does not allow")
_BUILD_ERROR = re.compile(r"\b\w*(?:Error|Exception|error): (?!Failed to )|\bCMake Error at ")
# What the command itself printed is above this.
_COMMAND_FAILED = re.compile(r"CalledProcessError|\bcommand .* failed\b", re.IGNORECASE)
# A long path comes on a line of its own.
_BAD_CONFIGURATION = re.compile(r"^\s*error: Failed to parse:\s+`?.*\.toml", re.MULTILINE)


# uv's words for a file without an upload time, and its hint for what it left out so.
_NO_TIME = re.compile(r"`([^`]+)` is missing an upload date")
_FILTERED = re.compile(r"`([^`]+)` was filtered by `exclude-newer`")

_PLAIN = ("--no-progress", "--color", "never")


class NoInterpreterError(MachineError):
    """uv finds no Python of the version that it needs."""


class NoUploadTimesError(ConfigurationError):
    """An index does not say when its files were uploaded, and packages are to be held to a moment."""


class TookTooLongError(ResolutionError):
    """uv was ended before it had an answer."""


@cache
def uv_program() -> Path:
    """The uv binary that the Python package ``uv`` brings.

    Raises:
        MachineError: the package is installed without its binary.
    """
    from uv import find_uv_bin

    try:
        return Path(find_uv_bin())
    except FileNotFoundError as error:
        raise MachineError(
            "the program uv is missing",
            why=str(error),
            fix="Install envbuild again into its environment: pip install --force-reinstall uv",
        ) from error


@cache
def uv_version() -> str:
    """The version of that binary, such as ``0.13.8``."""
    return answer([uv_program(), "--version"], what="ask uv for its version").split()[1]


def run_uv(
    arguments: Sequence[str | Path],
    *,
    what: str,
    log: Path,
    cwd: Path,
    on_line: Callable[[str], None] | None = None,
    most_seconds: float | None = None,
    own_indexes: bool = True,
    variables: Mapping[str, str] | None = None,
) -> Finished:
    """Run uv with ``arguments`` in ``cwd``; uv's own configuration and variables hold.

    Args:
        most_seconds: how long it may take.
        own_indexes: also the indexes of the user's own settings hold, and not those of the project alone.
        variables: besides those of uv's settings.

    Raises:
        ConfigurationError: uv's own configuration cannot be read.
        ResolutionError: uv found no solution (its explanation is kept).
        TookTooLongError: it took more than ``most_seconds``.
        NetworkError: an index could not be reached.
        MachineError: no fitting Python interpreter, the disk is full, or a signal ended uv.
    """
    with resolving_uv(own_indexes=own_indexes) as environment:

        def attempt(more: Mapping[str, str]) -> Finished:
            return run(
                [uv_program(), *_PLAIN, *arguments],
                what=what,
                log=log,
                on_line=on_line,
                check=False,
                options=ProcessOptions(
                    cwd=cwd,
                    env={**environment, **(variables or {}), **more},
                    working_on=cwd,
                    timeout_seconds=most_seconds,
                    error=TookTooLongError,
                ),
            )

        wanted = minor_of_project(cwd)
        known = behind_a_shim(f"3.{wanted}") if wanted is not None else None
        finished = attempt({"UV_PYTHON": str(known)} if known else {})
        if finished.status != 0 and _NO_INTERPRETER.search(finished.output) and (python := _passed_over(cwd)):
            finished = attempt({"UV_PYTHON": str(python)})
    if finished.status != 0:
        # First of all: on a full disk uv's last lines are about whatever file it wrote at that moment.
        if ran_out_of_space(finished.output, cwd):
            raise disk_full(full_disk(finished.output, cwd))
        # By Ctrl-C, or by the kernel when memory ran out: what it was asked stays unknown.
        if finished.status < 0:
            raise MachineError(
                f"cannot {what}: uv {describe_status(finished.status)}",
                why=tail(finished.output) or "It printed nothing.",
                fix="Run again; where memory is short, with fewer other programs.",
                log=log,
            )
        raise failure(finished, what, log)
    return finished


def refuse_ignored_settings(finished: Finished, what: str, log: Path) -> None:
    """Look at what a run of uv has ignored.

    Raises:
        CheckRefusedError: uv does not know a key of the project, and dropped other settings too.
    """
    if why := ignored_settings(finished.output):
        raise CheckRefusedError(f"cannot {what}: uv ignored settings", why=why, fix=KNOW_THE_KEYS, log=log)


def _passed_over(project: Path) -> Path | None:
    """A Python for the project in a folder that uv does not find, since a shim stands for it."""
    wanted = minor_of_project(project)
    return pyenv_python(f"3.{wanted}") if wanted is not None else None


def ignored_settings(output: str) -> str:
    """Uv's warning that it does not know a key of [tool.uv], after which it dropped the others too; empty: none."""
    return tail(output) if _DROPPED_SETTINGS.search(output) else ""


def _undated(output: str) -> list[str]:
    """The packages that uv left out, of which the index has files without upload times."""
    # uv breaks its hints into lines.
    text = " ".join(output.split())
    names = {canonicalize_name(file.partition("-")[0]) for file in _NO_TIME.findall(text)}
    return [name for name in dict.fromkeys(map(canonicalize_name, _FILTERED.findall(text))) if name in names]


def python_help(version: str) -> str:
    """How a machine gets a Python of a version."""
    return (
        f"Install Python {version} from any source, with python{version} on PATH; or let uv install it:\n"
        f"UV_PYTHON_DOWNLOADS=manual uv python install {version}\n"
        "Where GitHub cannot be reached, name a mirror of uv's Pythons first: UV_PYTHON_INSTALL_MIRROR."
    )


def _no_interpreter(output: str, what: str, log: Path) -> NoInterpreterError:
    match = _WANTED_PYTHON.search(output)
    python = match[1] if match else "3.X"
    named = f"Python {python}" if match else "the base's Python"
    return NoInterpreterError(
        f"cannot {what}: {named} is missing on this machine",
        why=f"uv found none that works, and downloaded none.\n{output}",
        fix=python_help(python),
        log=log,
    )


def _git_failure(output: str, what: str, log: Path) -> NetworkError:
    if _NO_COMMIT.search(output) and (commit := _COMMIT.search(output)):
        return NetworkError(
            f"cannot {what}: a git repository does not have commit {commit[1]}",
            why=f"Its branch was rewritten since (a forced push), or it is a mirror without old commits.\n{output}",
            fix="Lock again, which takes what the repository has now (envbuild lock --stack STACK --upgrade), or let "
            "git reach a repository that has it (url.<base>.insteadOf).",
            log=log,
        ).at_upstream()
    error = NetworkError(
        f"cannot {what}: uv cannot fetch from a git repository",
        why=output,
        fix="See whether the `git fetch` that it names above works here. What git needs to reach the repository is "
        "set in git itself: rewriting (url.<base>.insteadOf), http.proxy, http.sslCAInfo, credential.helper.",
        log=log,
    )
    # Of an outage another commit of upstream's is no cure.
    return error.at_upstream() if GONE.search(output) else error


def failure(finished: Finished, what: str, log: Path) -> EnvbuildError:
    """The error for a uv that failed."""
    output = tail(finished.output, lines=60)
    # Before the network: uv tries to download a Python that it does not find.
    if _NO_INTERPRETER.search(output):
        return _no_interpreter(output, what, log)
    # Before the network, too: what git says of a host that it cannot reach reads like an index that cannot be reached
    # (test_repository_that_cannot_be_fetched_is_a_network_error_about_git).
    if _GIT.search(output):
        return _git_failure(output, what, log)
    if _NETWORK.search(output):
        return NetworkError(
            f"cannot {what}: a package index or a file on it cannot be reached",
            why=output,
            fix="Check the network, the proxy and the CA bundle (SSL_CERT_FILE), and the index that uv uses "
            "(UV_DEFAULT_INDEX, uv.toml) with its user and password.",
            log=log,
        )
    if _BAD_ANSWER.search(output):
        return NetworkError(
            f"cannot {what}: a package index answers what uv cannot use",
            why=output,
            fix="Look at what the address above answers: it may be a proxy's page, or a mirror that is damaged. Use "
            "another index (UV_DEFAULT_INDEX, uv.toml), or another version of that package.",
            log=log,
        )
    if _BAD_CONFIGURATION.search(output):
        return ConfigurationError(
            f"cannot {what}: uv's own configuration cannot be read",
            why=output,
            fix="Correct the key that uv names above in your uv.toml (or what UV_CONFIG_FILE points to).",
            log=log,
        )
    short = shortage(finished.output) if _NOT_BUILT.search(finished.output) else ""
    return _short_build(short, output, what, log) if short else _unresolved(output, what, log)


def _short_build(line: str, output: str, what: str, log: Path) -> MachineError:
    return MachineError(
        f"cannot {what}: a build had too little memory, or time",
        why=f"{line}\n{output}",
        fix="Run again when less else runs on this machine; nothing was decided by this.",
        log=log,
    )


def _unresolved(output: str, what: str, log: Path) -> EnvbuildError:
    if (unbuilt := _NOT_BUILT.search(output)) is not None:
        if never := _NEVER_IN_BUILDS.search(" ".join(output.split())):
            package = f"{never[1]}, which has an index of its own"
            return isolated_build_error(unbuilt[1], unbuilt[1], package, why=output, log=log)
        errors = [line.strip() for line in output[unbuilt.end() :].splitlines() if _BUILD_ERROR.search(line)]
        errors = [line for line in errors if not _COMMAND_FAILED.search(line)] or errors
        last = f"The build's last error: {errors[-1]}\n" if errors else ""
        return ResolutionError(
            f"cannot {what}",
            why=f"{last}{output}",
            fix=f"Take another version of {unbuilt[1]}, or of what asks for it. If its build imports torch, its place "
            f'is phase compile: [components.{unbuilt[1]}] of the stack with phase = "compile".',
            log=log,
        )
    if undated := _undated(output):
        error = NoUploadTimesError(
            f"cannot {what}: the index does not say when {', '.join(undated)} was uploaded",
            why=f"So nothing can be held to the as-of moment. Its pages carry no upload times (PEP 700).\n{output}",
            fix="Use an index with upload times, or take what there is now: --no-as-of, which the record states.",
            log=log,
        )
        error.packages = undated
        return error
    return ResolutionError(
        f"cannot {what}",
        why=output,
        fix="Relax a version in the stack's file (uv names above those that exclude each other), or choose another "
        "base.",
        log=log,
    )
