"""Pythons that uv does not find by itself, and projects that need none of the base's version."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tomlkit
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from envbuild.core import tomlread
from envbuild.core.errors import EnvbuildError
from envbuild.core.process import answer

# How `lock` writes requires-python: ==3.12.*
_MINOR = re.compile(r"==(3)\.(\d+)\.\*")
_OF_A_MINOR = re.compile(r"(py|cp|pp|graalpy)3(\d+)")
_WHEEL = re.compile(r"""^    \{ [^"]*"(?:[^"]*/)?([^"/]+\.whl)".* \},$""")
_REQUIRES_PYTHON = re.compile(r'^requires-python = "[^"]*"$', re.MULTILINE)


@cache
def pyenv_python(version: str) -> Path | None:
    """A working Python of a version (``3.12``) among those that pyenv keeps; None: it has none.

    uv finds pyenv's shims on the search path, and a shim fails for each version that pyenv does not select.
    """
    programs = _root().glob(f"versions/{version}*/bin/python{version}")
    return next((path for path in sorted(programs, key=_numbers, reverse=True) if _answers(path, version)), None)


def behind_a_shim(version: str) -> Path | None:
    """The Python of a version for which pyenv's shim comes first on the search path; None: none does.

    uv prints an error for a shim that does not work, also where another Python does.
    """
    shim = shutil.which(f"python{version}")
    return pyenv_python(version) if shim and Path(shim).parent == _root() / "shims" else None


def _root() -> Path:
    return Path(os.environ.get("PYENV_ROOT") or Path("~/.pyenv").expanduser())


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.parents[1].name)]


def _answers(path: Path, version: str) -> bool:
    """Whether a program is a Python of this version."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    with contextlib.suppress(EnvbuildError):
        return answer([path, "-I", "-c", code], what=f"ask {path} for its version") == version
    return False


def minor_of_project(folder: Path) -> int | None:
    """The 12 of the ``==3.12.*`` that the pyproject.toml in a folder requires; None: it has another one, or none."""
    with contextlib.suppress(OSError, ValueError):
        document = tomlread.loads((folder / "pyproject.toml").read_text())
        return minor_version(str(document.get("project", {}).get("requires-python", "")))
    return None


def minor_version(requires_python: str) -> int | None:
    """The 12 of ``==3.12.*``; None for other specifiers."""
    match = _MINOR.fullmatch(requires_python)
    return int(match[2]) if match else None


def for_any_python(project: str) -> str:
    """The text of a project that uv resolves for the same Python with whichever it runs.

    ``requires-python`` is what uv looks for a Python by. A marker limits the resolution to the base's in its place
    (uv 0.13.8: it also takes releases that need that Python and no older one).
    """
    document: Any = tomlkit.parse(project)
    wanted = minor_version(document["project"]["requires-python"])
    if wanted is None:
        return project
    document["project"]["requires-python"] = f">=3.{min(wanted, sys.version_info[1])}"
    limit = f"python_full_version >= '3.{wanted}' and python_full_version < '3.{wanted + 1}'"
    uv = document["tool"]["uv"]
    uv["environments"] = [f"{marker} and {limit}" for marker in uv.get("environments", [])] or [limit]
    return tomlkit.dumps(document)


def with_requires_python(uv_lock: str, project: str) -> str:
    """The text of a uv.lock of such a project as it is of ``project``: without wheels for other Pythons."""
    requires = str(tomlkit.parse(project)["project"]["requires-python"])
    wanted = minor_version(requires)
    if wanted is None:
        return uv_lock
    # uv writes a line for each wheel.
    lines = [line for line in uv_lock.splitlines() if not (match := _WHEEL.match(line)) or _is_for(match[1], wanted)]
    text = _REQUIRES_PYTHON.sub(f'requires-python = "{requires}"', "\n".join([*lines, ""]), count=1)
    # uv writes no list without wheels.
    return text.replace("\nwheels = [\n]", "")


def _is_for(wheel: str, minor: int) -> bool:
    """Whether uv locks a wheel for Python 3.minor, whatever its platform (``RequiresPython::matches_wheel_tag``)."""
    try:
        tags = parse_wheel_filename(unquote(wheel))[3]
    except InvalidWheelFilename:
        return True
    for tag in tags:
        match = _OF_A_MINOR.match(tag.interpreter) if tag.abi != "abi3" else None
        # py3N is the first Python that a wheel is for, the others are the only one.
        if match is None or int(match[2]) == minor or (match[1] == "py" and int(match[2]) < minor):
            return True
    return False
