"""What a pyproject.toml declares before a build, and the requirement lines of packages (PEP 508, 518, 621)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from envbuild.core import tomlread

PYPROJECT = "pyproject.toml"
_BEFORE_BUILD = ("dependencies", "optional-dependencies")
# PEP 518: what builds a project that does not say.
DEFAULT_BUILD_REQUIRES = ("setuptools>=40.8.0",)
# transformer-engine-torch's sdist names the core of one CUDA major version, whatever it is built against.
_CUDA_NAME = re.compile(r"^(?P<stem>.+)[-_.]cu(?P<major>\d\d)$")


def read_requirement(line: str) -> Requirement | None:
    """A PEP 508 line; None for one that cannot be read: uv reports what is wrong with it."""
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None


def read_pyproject(pyproject: str) -> dict[str, Any]:
    """A pyproject.toml as a dictionary.

    Raises:
        ValueError: it is not TOML.
    """
    try:
        return tomlread.loads(pyproject)
    except ValueError as error:
        raise ValueError(f"Its {PYPROJECT} cannot be read: {error}") from error


def before_build(text: str) -> tuple[list[str], list[str]] | None:
    """The requirements and the extras that [project] states; ``None``: it leaves them to the build.

    Raises:
        ValueError: the text is not TOML, or not of that form.
    """
    project = read_pyproject(text).get("project")
    if not isinstance(project, dict):
        return None
    open_fields = project.get("dynamic", [])
    main, optional = project.get("dependencies", []), project.get("optional-dependencies", {})
    if not isinstance(optional, dict) or not all(_are_texts(item) for item in (open_fields, main, *optional.values())):
        raise ValueError(f"Its {PYPROJECT} states dependencies in [project] in another form than lists of texts.")
    if any(field in open_fields for field in _BEFORE_BUILD):
        return None
    lines = [*main, *(marked_line(line, "", extra) for extra, texts in optional.items() for line in texts)]
    return lines, list(optional)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def build_requires(pyproject: str | None) -> tuple[str, ...]:
    """What a project must have installed to be built, as PEP 508 lines (PEP 518); ``None``: it has no pyproject.toml.

    Raises:
        ValueError: the text is not TOML, or not of that form.
    """
    lines = read_pyproject(pyproject or "").get("build-system", {})
    if isinstance(lines, dict):
        lines = lines.get("requires", list(DEFAULT_BUILD_REQUIRES))
    if not _are_texts(lines):
        raise ValueError(f"[build-system] requires is not a list of strings: {lines!r}")
    return tuple(lines)


def marked_line(line: str, marker: str, extra: str) -> str:
    """A requirement that holds under a marker and an extra, in addition to its own."""
    markers = [marker, f"extra == '{extra}'" if extra else ""]
    if not any(markers):
        return line
    if (requirement := read_requirement(line)) is not None and requirement.marker is not None:
        markers.insert(0, str(requirement.marker))
        requirement.marker = None
        line = str(requirement)
    stated = [item for item in markers if item]
    return f"{line} ; {stated[0] if len(stated) == 1 else ' and '.join(f'({item})' for item in stated)}"


def with_cuda_names(lines: Sequence[str], cuda_major: str | None) -> tuple[list[str], list[str]]:
    """Requirements with the names of a base's CUDA in them, and what was rewritten, as ``old -> new``."""
    requires, rewritten = [], []
    for line in lines:
        requirement = read_requirement(line)
        match = _CUDA_NAME.match(requirement.name) if requirement is not None else None
        if requirement is None or match is None or cuda_major in (None, match["major"]):
            requires.append(line)
            continue
        new = line.replace(requirement.name, f"{match['stem']}-cu{cuda_major}", 1)
        requires.append(new)
        rewritten.append(f"{line} -> {new}")
    return requires, rewritten
