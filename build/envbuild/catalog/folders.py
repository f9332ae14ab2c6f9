"""What is in a folder of ``envs/``, also where this account may not look, or a link leads nowhere."""

from __future__ import annotations

from pathlib import Path

from envbuild.core.errors import ConfigurationError
from envbuild.core.files import machine_errors, os_error


def exists(path: Path) -> bool:
    """Whether anything has this name, be it a link that points nowhere.

    Raises:
        MachineError: this account may not look.
    """
    try:
        # lstat, so that a link which leads nowhere is reported and not passed over.
        path.lstat()
    except PermissionError as error:
        raise os_error(error, path, "read") from error
    except OSError:
        return False
    return True


def listed(folder: Path) -> list[str]:
    if not exists(folder):
        return []
    with machine_errors(folder, "read"):
        # Not glob(), which finds nothing in a folder that may not be read, and raises nothing.
        return [path.name for path in folder.iterdir()]


def no_file(path: Path) -> ConfigurationError:
    points_to = f"It is a symbolic link to {path.readlink()}, where no file is." if path.is_symlink() else ""
    return ConfigurationError(
        f"{path} is not a file",
        why=points_to or ("It is a directory." if path.is_dir() else "It is something special."),
        fix="Put the definition there as a file, or remove what is there.",
    )
