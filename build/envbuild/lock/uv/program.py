"""The uv program, and what its failures mean."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import tomlkit

from envbuild.core import tomlread
from envbuild.core.background import background_process
from envbuild.core.errors import (
    CheckRefusedError,
    ConfigurationError,
    EnvbuildError,
    MachineError,
    NetworkError,
    ResolutionError,
    disk_full,
)
from envbuild.core.exit_status import ran_out_of_space, tail
from envbuild.core.files import machine_errors
from envbuild.core.process import Finished, ProcessOptions, answer, run

# uv 0.13 has no machine-readable errors; these phrases are its own words for "could not be reached".
_NETWORK = re.compile(
    r"Failed to fetch|error sending request|dns error|Connection refused|network was disabled|"
    r"operation timed out|lack of valid authentication credentials|tls handshake|invalid peer certificate",
    re.IGNORECASE,
)
_GIT = re.compile(r"Git operation failed")
_NO_INTERPRETER = re.compile(
    r"No interpreter found for|Failed to inspect Python interpreter"
    r"|Failed to download `[^`]*/(cpython|pypy|graalpy)-",
    re.IGNORECASE,
)
# What these say, the project says: the same inputs would give another lock where one of them is set.
_OVER_THE_PROJECT = frozenset(
    [
        "RUST_LOG",
        "UV_BUILD_CONSTRAINT",
        "UV_CONFIG_FILE",
        "UV_CONSTRAINT",
        "UV_EXCLUDE",
        "UV_EXCLUDE_NEWER",
        "UV_FORK_STRATEGY",
        "UV_FROZEN",
        "UV_ISOLATED",
        "UV_LOCKED",
        "UV_NO_BINARY",
        "UV_NO_BINARY_PACKAGE",
        "UV_NO_BUILD",
        "UV_NO_BUILD_ISOLATION",
        "UV_NO_BUILD_PACKAGE",
        "UV_NO_CONFIG",
        "UV_NO_SOURCES",
        "UV_NO_SOURCES_PACKAGE",
        "UV_OVERRIDE",
        "UV_PRERELEASE",
        "UV_PROJECT",
        "UV_PYTHON",
        "UV_RESOLUTION",
        "UV_TORCH_BACKEND",
        "UV_UPGRADE",
        "UV_WORKING_DIR",
        "UV_WORKING_DIRECTORY",
    ]
)
# Beside these, what changes how pinned and hashed requirements are installed.
_OVER_WHAT_IS_LOCKED = _OVER_THE_PROJECT | {"UV_NO_VERIFY_HASHES", "UV_REQUIRE_HASHES", "UV_SYSTEM_PYTHON"}
# The same in a uv.toml; what is left says where packages are and how they are reached.
_DECIDING_KEYS = frozenset(
    [
        "build-constraint-dependencies",
        "config-settings",
        "config-settings-package",
        "constraint-dependencies",
        "dependency-metadata",
        "environments",
        "exclude-dependencies",
        "exclude-newer",
        "exclude-newer-package",
        "extra-build-dependencies",
        "extra-build-variables",
        "fork-strategy",
        "no-binary",
        "no-binary-package",
        "no-build",
        "no-build-isolation",
        "no-build-isolation-package",
        "no-build-package",
        "no-sources",
        "no-sources-package",
        "override-dependencies",
        "prerelease",
        "required-environments",
        "resolution",
        "sources",
        "torch-backend",
        "upgrade",
        "upgrade-package",
    ]
)
# What of the table [pip] says where packages are, too.
_PLACES_OF_PIP = frozenset(["extra-index-url", "find-links", "index-strategy", "index-url", "keyring-provider"])
# One unknown [tool.uv] key is only a warning, after which uv drops other settings too.
_DROPPED_SETTINGS = re.compile(r"Failed to parse `.*pyproject\.toml` during settings discovery|unknown field")
KNOW_THE_KEYS = "Use the uv that envbuild pins: another one does not know a key of [tool.uv] that envbuild writes."
# A long path comes on a line of its own.
_BAD_CONFIGURATION = re.compile(r"^\s*error: Failed to parse:\s+`?.*\.toml", re.MULTILINE)


_PLAIN = ("--no-progress", "--color", "never")


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


def git_environment() -> dict[str, str]:
    """What makes uv use plain git, whose settings (rewriting, credentials) hold, and fetch no large files."""
    return {"UV_NO_GITHUB_FAST_PATH": "1", "GIT_LFS_SKIP_SMUDGE": "1", "GIT_TERMINAL_PROMPT": "0"}


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    environment = dict(os.environ if env is None else env)
    environment.pop("VIRTUAL_ENV", None)
    return environment | git_environment()


@contextlib.contextmanager
def uv_meanwhile(arguments: Sequence[str | Path], *, what: str, cwd: Path) -> Iterator[None]:
    """Uv at work while the block runs, for what it leaves in its cache; how it ends does not matter."""
    with (
        _project_counts(_environment(None)) as environment,
        background_process([uv_program(), *_PLAIN, "--quiet", *arguments], what=what, env=environment, cwd=cwd),
    ):
        yield


def run_uv(
    arguments: Sequence[str | Path],
    *,
    what: str,
    log: Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    settings_may_be_ignored: bool = False,
) -> Finished:
    """Run uv with ``arguments`` in ``cwd``; uv's own configuration and variables hold.

    Args:
        settings_may_be_ignored: whoever calls looks at :func:`ignored_settings` of the output.

    Raises:
        CheckRefusedError: uv does not know a key of the project, and dropped other settings too.
        ConfigurationError: uv's own configuration cannot be read.
        ResolutionError: uv found no solution (its explanation is kept).
        NetworkError: an index could not be reached.
        MachineError: no fitting Python interpreter, or the disk is full.
    """
    with _project_counts(_environment(env)) as environment:
        finished = run(
            [uv_program(), *_PLAIN, *arguments],
            what=what,
            log=log,
            on_line=on_line,
            check=False,
            options=ProcessOptions(cwd=cwd, env=environment, working_on=cwd),
        )
    if finished.status != 0:
        if ran_out_of_space(finished.output, cwd):
            raise disk_full(cwd)
        raise failure(finished, what, log)
    if not settings_may_be_ignored and (why := ignored_settings(finished.output)):
        raise CheckRefusedError(f"cannot {what}: uv ignored settings", why=why, fix=KNOW_THE_KEYS, log=log)
    return finished


@contextlib.contextmanager
def _project_counts(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """An environment in which the project's [tool.uv] holds, next to the user's own configuration.

    With UV_CONFIG_FILE or UV_NO_CONFIG uv reads no pyproject.toml, without a warning: the as-of moment, the glibc
    and the overrides are gone. So that file takes the place of the user's uv.toml instead. Other variables and keys put
    something over the project's, or add to it, and are left out.
    """
    kept = {name: value for name, value in environment.items() if name not in _OVER_THE_PROJECT}
    named, none = environment.get("UV_CONFIG_FILE"), environment.get("UV_NO_CONFIG")
    home = _settings_folder(kept)
    own, system = _settings_files(environment)
    if not named and not none and not any(_decides(path) for path in (own, system) if path):
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="envbuild-uv-") as name, machine_errors(Path(name)):
        folder = Path(name)
        for part, source in (("home", own), ("system", system)):
            (folder / part / "uv").mkdir(parents=True)
            if source is not None and not none and (named or source.is_file()):
                _copy_of_site_settings(source, folder / part / "uv/uv.toml")
        (folder / "home/git").symlink_to(home / "git")  # git's settings are under the same folder
        yield {**kept, "XDG_CONFIG_HOME": f"{name}/home", "XDG_CONFIG_DIRS": f"{name}/system"}


def _settings_folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".config")


def _settings_files(environment: Mapping[str, str]) -> tuple[Path, Path | None]:
    """The user's uv.toml, or the one that is named in its place, and the system's."""
    named = environment.get("UV_CONFIG_FILE")
    own = Path(named).expanduser().absolute() if named else _settings_folder(environment) / "uv/uv.toml"
    systems = [Path(name) / "uv/uv.toml" for name in (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    return own, next((path for path in (*systems, Path("/etc/uv/uv.toml")) if path.is_file()), None)


@contextlib.contextmanager
def installing_uv() -> Iterator[dict[str, str]]:
    """The variables of a uv that installs what was locked, so that nothing on this machine changes what that is.

    The user's and the system's uv.toml say where packages are and how they are reached. What they and uv's variables
    say beyond that is left out, and so is all of a pyproject.toml in the current directory.
    """
    environment = _environment(None)
    kept = {name: value for name, value in environment.items() if name not in {*_OVER_WHAT_IS_LOCKED, "PYTHONPATH"}}
    own, system = _settings_files(environment)
    named, none = environment.get("UV_CONFIG_FILE"), environment.get("UV_NO_CONFIG")
    # A file that is named and is not there is for uv to refuse.
    files = [path for path in (own, None if named else system) if path and (named or path.is_file()) and not none]
    if not files:
        yield {**kept, "UV_NO_CONFIG": "1"}
    elif len(files) == 1 and not _decides(files[0], ("pip",)):
        yield {**kept, "UV_CONFIG_FILE": str(files[0])}
    else:
        with tempfile.TemporaryDirectory(prefix="envbuild-uv-") as name:
            merged, places = Path(name) / "uv.toml", _places(files)
            with machine_errors(merged):
                merged.write_text(tomlkit.dumps(places))
            yield {**kept, "UV_CONFIG_FILE": str(merged)}


def _places(files: Sequence[Path]) -> dict[str, object]:
    """What uv.toml files say of where packages are; of two, the first wins, and lists are joined, as uv does.

    Raises:
        ConfigurationError: one cannot be read.
    """
    found: dict[str, object] = {}
    for file in files:
        try:
            settings = tomlread.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"uv's own configuration {file} cannot be read", why=str(error), fix="Correct the file."
            ) from error
        pip = {key: value for key, value in settings.pop("pip", {}).items() if key in _PLACES_OF_PIP}
        for key, value in {**settings, **({"pip": pip} if pip else {})}.items():
            before = found.get(key)
            if isinstance(before, list) and isinstance(value, list):
                found[key] = [*before, *value]
            elif key not in _DECIDING_KEYS:
                found.setdefault(key, value)
    return found


def _decides(path: Path, more: Sequence[str] = ()) -> bool:
    """Whether a uv.toml has a key that would change locks."""
    try:
        return bool({*_DECIDING_KEYS, *more} & tomlread.loads(path.read_text()).keys())
    except (OSError, ValueError):
        return False  # uv says what is wrong with it


def _copy_of_site_settings(source: Path, target: Path) -> None:
    if not _decides(source):
        target.symlink_to(source)
        return
    document = tomlkit.parse(source.read_text())
    for key in _DECIDING_KEYS & set(document):
        del document[key]
    target.write_text(tomlkit.dumps(document))


def ignored_settings(output: str) -> str:
    """Uv's warning that it does not know a key of [tool.uv], after which it dropped the others too; empty: none."""
    return tail(output) if _DROPPED_SETTINGS.search(output) else ""


def failure(finished: Finished, what: str, log: Path) -> EnvbuildError:
    """The error for a uv that failed."""
    output = tail(finished.output, lines=60)
    # Before the network: uv tries to download a Python that it does not find.
    if _NO_INTERPRETER.search(output):
        return MachineError(
            f"cannot {what}: no Python of the base's version is on this machine",
            why=output,
            fix="Install that Python (any source will do; it only reads metadata); or let uv download it: unset "
            "UV_PYTHON_DOWNLOADS, and where there is no way to GitHub, name a mirror with UV_PYTHON_INSTALL_MIRROR.",
            log=log,
        )
    if _GIT.search(output):
        return NetworkError(
            f"cannot {what}: uv cannot fetch from a git repository",
            why=output,
            fix="See whether the `git fetch` that it names above works here. What git needs to reach the repository is "
            "set in git itself: rewriting (url.<base>.insteadOf), http.proxy, http.sslCAInfo, credential.helper.",
            log=log,
        )
    if _NETWORK.search(output):
        return NetworkError(
            f"cannot {what}: a package index or a file on it cannot be reached",
            why=output,
            fix="Check the network, the proxy and the CA bundle (SSL_CERT_FILE), and the index that uv uses "
            "(UV_DEFAULT_INDEX, uv.toml) with its user and password.",
            log=log,
        )
    if _BAD_CONFIGURATION.search(output):
        return ConfigurationError(
            f"cannot {what}: uv's own configuration cannot be read",
            why=output,
            fix="Correct the file that uv names above (a uv.toml, or what UV_CONFIG_FILE points to).",
            log=log,
        )
    return ResolutionError(
        f"cannot {what}",
        why=output,
        fix="Relax a version in the stack's file (uv names above those that exclude each other), or choose another "
        "base.",
        log=log,
    )
