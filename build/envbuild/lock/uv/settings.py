"""The environment and the configuration that uv runs with: what the project and the lock say wins."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomlkit

from envbuild.core import tomlread
from envbuild.core.errors import ConfigurationError
from envbuild.core.files import machine_errors

# The settings of the user that uv gets, by their keys in a uv.toml. Everything else could change a lock or what is
# installed of it; index-strategy, too, decides versions. First, how indexes are reached:
_REACHING_KEYS = frozenset(
    [
        "allow-insecure-host",
        "concurrent-downloads",
        "extra-index-url",
        "http-proxy",
        "https-proxy",
        "index",
        "index-url",
        "native-tls",
        "no-proxy",
        "offline",
        "system-certs",
    ]
)
# Those of them that name places of packages.
_PLACES = frozenset(["default-index", "extra-index-url", "find-links", "index", "index-url", "no-index"])
# Besides these, where files and Pythons are, and where they are kept.
_KEYS = _REACHING_KEYS | frozenset(
    [
        "cache-dir",
        "concurrent-builds",
        "concurrent-installs",
        "find-links",
        "keyring-provider",
        "link-mode",
        "no-cache",
        "no-index",
        "pypy-install-mirror",
        "python-downloads",
        "python-downloads-json-url",
        "python-install-mirror",
        "python-preference",
    ]
)
# The same of an index: it may have an exclude-newer of its own.
_KEYS_OF_INDEX = frozenset(
    ["authenticate", "cache-control", "default", "explicit", "format", "ignore-error-codes", "name", "url"]
)
# And the settings that are variables alone.
_REACHING = re.compile(r"UV_(?:DEFAULT_INDEX|INDEX_\w+_(?:USERNAME|PASSWORD)|INSECURE_HOST|HTTP_\w+|REQUEST_TIMEOUT)")
_VARIABLES = re.compile(
    r"UV_(?:CREDENTIALS_DIR|(?:GITHUB|AUTH)_TOKEN|(?:S3|GCS|AZURE)_ENDPOINT_URL|LOCK_TIMEOUT|CONCURRENT_\w+"
    r"|PYTHON_\w+|ASTRAL_MIRROR_URL)"
)


NO_FAST_PATH = "UV_NO_GITHUB_FAST_PATH"


def git_environment() -> dict[str, str]:
    """What makes uv use plain git, whose settings (rewriting, credentials) hold, and fetch no large files."""
    # uv 0.13.8 asks GitHub's HTTP API before git, past url.<base>.insteadOf; with the first variable it does not. The
    # second keeps NeMo's clone small. The third keeps git from waiting for a password at a terminal.
    return {NO_FAST_PATH: "1", "GIT_LFS_SKIP_SMUDGE": "1", "GIT_TERMINAL_PROMPT": "0"}


def _environment() -> dict[str, str]:
    # uv warns of a VIRTUAL_ENV that is not the project's, and RUST_LOG adds lines to the output that is read.
    unused = {"RUST_LOG", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in unused and _is_allowed(name)}
    return kept | git_environment()


def _is_allowed(variable: str) -> bool:
    is_own = variable.startswith("UV_")
    return not is_own or reaches_indexes(variable) or _key(variable) in _KEYS or bool(_VARIABLES.fullmatch(variable))


def reaches_indexes(variable: str) -> bool:
    """Whether a variable of uv's says how indexes are reached, and nothing of where files are kept."""
    return _key(variable) in _REACHING_KEYS or _REACHING.fullmatch(variable) is not None


def _key(variable: str) -> str:
    """The key of a uv.toml that says the same as a variable; empty for variables of other programs."""
    return variable.removeprefix("UV_").lower().replace("_", "-") if variable.startswith("UV_") else ""


@contextlib.contextmanager
def resolving_uv(*, own_indexes: bool = True) -> Iterator[dict[str, str]]:
    """The variables of a uv that resolves: the project's [tool.uv] holds, next to what is allowed of the user's own.

    Args:
        own_indexes: also the indexes of the user's own; without them the project's hold alone.

    Raises:
        ConfigurationError: a uv.toml cannot be read.
    """
    environment = _environment()
    if not own_indexes:
        environment = {name: value for name, value in environment.items() if _key(name) not in _PLACES}
    with tempfile.TemporaryDirectory(prefix="envbuild-uv-") as name, machine_errors(Path(name)):
        # With UV_CONFIG_FILE or UV_NO_CONFIG uv reads no pyproject.toml, without a warning: the as-of moment, the glibc
        # and the overrides are gone. So the settings take the place of the user's uv.toml, and of the system's.
        home, system = Path(name) / "home", Path(name) / "system"
        for folder in (home, system):
            (folder / "uv").mkdir(parents=True)
        (home / "uv/uv.toml").write_text(_settings(without=frozenset() if own_indexes else _PLACES))
        (system / "uv/uv.toml").touch()
        own = _settings_folder(environment)
        for entry in own.iterdir() if own.is_dir() else ():  # git's settings, say
            if entry.name != "uv":
                (home / entry.name).symlink_to(entry)
        yield {**environment, "XDG_CONFIG_HOME": str(home), "XDG_CONFIG_DIRS": str(system)}


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
    """The variables of a uv that installs what was locked: of the user's own settings those that are allowed.

    Raises:
        ConfigurationError: a uv.toml cannot be read.
    """
    environment = _environment()
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="envbuild-uv-") as name:
        # It keeps uv from reading the [tool.uv] of a pyproject.toml in the current directory or above, too
        # (test_a_pyproject_of_the_current_directory_changes_nothing_of_what_is_installed).
        file = Path(name) / "uv.toml"
        with machine_errors(file):
            file.write_text(_settings())
        yield {**environment, "UV_CONFIG_FILE": str(file)}


def _settings(without: Collection[str] = ()) -> str:
    """A uv.toml with what is allowed of the user's, then of the system's; lists are joined, as uv does."""
    merged: dict[str, Any] = {}
    for file in settings_files(os.environ):
        try:
            settings = tomlread.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"uv's own configuration {file} cannot be read", why=str(error), fix="Correct the file."
            ) from error
        allowed = _allowed(settings, file.parent)
        for key, value in ((key, value) for key, value in allowed.items() if key not in without):
            is_list = isinstance(value, list) and isinstance(merged.get(key), list)
            merged[key] = [*merged[key], *value] if is_list else merged.get(key, value)
    return tomlkit.dumps(merged)


def _allowed(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The allowed keys of a uv.toml, also of its table [pip]; paths there count from its folder."""
    allowed = {key: value for key, value in settings.items() if key in _KEYS}
    for key in ("index-url", "extra-index-url", "find-links"):
        if isinstance(places := allowed.get(key), list):
            allowed[key] = [_from(folder, place) for place in places]
        elif key in allowed:
            allowed[key] = _from(folder, places)
    if isinstance(indexes := allowed.get("index"), list):
        allowed["index"] = [
            {
                key: _from(folder, value) if key == "url" else value
                for key, value in index.items()
                if key in _KEYS_OF_INDEX
            }
            for index in indexes
            if isinstance(index, dict)
        ]
    if isinstance(pip := settings.get("pip"), dict):
        allowed["pip"] = _allowed(pip, folder)
    return allowed


def _from(folder: Path, place: Any) -> Any:
    is_path = isinstance(place, str) and "://" not in place and not place.startswith("file:")
    return str(folder / place) if is_path else place
