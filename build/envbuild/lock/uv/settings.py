"""The environment and the configuration that uv runs with: what the project and the lock say wins."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tomlkit

from envbuild.core import tomlread
from envbuild.core.errors import ConfigurationError
from envbuild.core.files import machine_errors

# The project states all of this itself: with one of these set, the same inputs would give another lock.
_OVER_THE_PROJECT = frozenset(
    [
        # Not a setting: its lines would be among the output, from which requirements and error messages are read.
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

# And what changes how pinned and hashed requirements are installed.
_OVER_WHAT_IS_LOCKED = _OVER_THE_PROJECT | {"UV_NO_VERIFY_HASHES", "UV_REQUIRE_HASHES", "UV_SYSTEM_PYTHON"}

# The same in a uv.toml; the other keys are about where packages are and how they are reached.
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

# The keys of the table [pip] that are about where packages are.
_PLACES_OF_PIP = frozenset(["extra-index-url", "find-links", "index-strategy", "index-url", "keyring-provider"])


def git_environment() -> dict[str, str]:
    """What makes uv use plain git, whose settings (rewriting, credentials) hold, and fetch no large files."""
    # uv 0.13.8 asks GitHub's HTTP API before git, past url.<base>.insteadOf; with the first variable it does not. The
    # second keeps NeMo's clone small. The third keeps git from waiting for a password at a terminal.
    return {"UV_NO_GITHUB_FAST_PATH": "1", "GIT_LFS_SKIP_SMUDGE": "1", "GIT_TERMINAL_PROMPT": "0"}


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # The environment that envbuild may run in: uv warns that it is not the project's.
    environment.pop("VIRTUAL_ENV", None)
    return environment | git_environment()


@contextlib.contextmanager
def resolving_uv() -> Iterator[dict[str, str]]:
    """The variables of a uv that resolves: the project's [tool.uv] holds, next to the user's own configuration.

    With UV_CONFIG_FILE or UV_NO_CONFIG uv reads no pyproject.toml, without a warning: the as-of moment, the glibc
    and the overrides are gone. So that file takes the place of the user's uv.toml instead. Other variables and keys put
    something over the project's, or add to it, and are left out.
    """
    environment = _environment()
    kept = {name: value for name, value in environment.items() if name not in _OVER_THE_PROJECT}
    named, none = environment.get("UV_CONFIG_FILE"), environment.get("UV_NO_CONFIG")
    home = _settings_folder(kept)
    own, system = _places_of_settings(environment)
    # In most cases: uv finds the user's files itself.
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


def _places_of_settings(environment: Mapping[str, str]) -> tuple[Path, Path | None]:
    """The user's uv.toml, or the one that is named in its place, and the system's."""
    named = environment.get("UV_CONFIG_FILE")
    own = Path(named).expanduser().absolute() if named else _settings_folder(environment) / "uv/uv.toml"
    # uv's system-wide file: in a folder of XDG_CONFIG_DIRS, else in /etc/uv (uv's documentation, "Configuration
    # files").
    systems = [Path(name) / "uv/uv.toml" for name in (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    return own, next((path for path in (*systems, Path("/etc/uv/uv.toml")) if path.is_file()), None)


def settings_files(environment: Mapping[str, str]) -> list[Path]:
    """The uv.toml files that uv reads with these variables; of two, the first wins."""
    own, system = _places_of_settings(environment)
    if environment.get("UV_NO_CONFIG"):
        return []
    if environment.get("UV_CONFIG_FILE"):
        return [own]  # one that is not there is for uv to refuse
    return [path for path in (own, system) if path is not None and path.is_file()]


@contextlib.contextmanager
def installing_uv() -> Iterator[dict[str, str]]:
    """The variables of a uv that installs what was locked, so that nothing on this machine changes what that is.

    The user's and the system's uv.toml say where packages are and how they are reached. What they and uv's variables
    say beyond that is left out, and so is all of a pyproject.toml in the current directory.
    """
    environment = _environment()
    kept = {name: value for name, value in environment.items() if name not in {*_OVER_WHAT_IS_LOCKED, "PYTHONPATH"}}
    files = settings_files(environment)
    # Either variable keeps uv from reading the [tool.uv] of a pyproject.toml in the current directory or above
    # (test_a_pyproject_of_the_current_directory_changes_nothing_of_what_is_installed).
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
        return False  # uv reports what is wrong with it


def _copy_of_site_settings(source: Path, target: Path) -> None:
    if not _decides(source):
        target.symlink_to(source)
        return
    document = tomlkit.parse(source.read_text())
    for key in _DECIDING_KEYS & set(document):
        del document[key]
    target.write_text(tomlkit.dumps(document))
