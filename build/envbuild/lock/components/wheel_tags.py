"""The tags of wheels, and those that a base can install."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from envbuild.catalog.models import MACHINES, Base


def base_tags(base: Base) -> frozenset[Tag]:
    """The wheel tags that a base can install (PEP 425, PEP 600)."""
    major, minor = (int(part) for part in base.python.version.split("."))
    glibc = int(base.glibc.split(".")[1])
    machine = MACHINES[base.platform]
    platforms = [f"manylinux_2_{number}_{machine}" for number in range(glibc, 4, -1)]
    platforms += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]
    interpreter = f"cp{major}{minor}"
    return frozenset(
        [
            *cpython_tags((major, minor), platforms=platforms),
            *compatible_tags((major, minor), interpreter, platforms),
        ]
    )


def wheel_name(file: Mapping[str, Any]) -> str:
    """The file name of an entry under ``wheels`` of a uv.lock."""
    return str(file.get("filename") or file.get("path") or file.get("url", "")).rsplit("/", 1)[-1].replace("%2B", "+")


def tags_of(wheel: str) -> frozenset[Tag]:
    """The tags in the file name of a wheel; empty for other names."""
    try:
        return parse_wheel_filename(wheel)[3]
    except InvalidWheelFilename:
        return frozenset()
