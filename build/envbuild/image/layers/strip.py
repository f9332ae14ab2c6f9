"""Removes what depends on the building machine, and compares what is installed with the lock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.core.errors import CheckRefusedError, InternalError
from envbuild.core.files import machine_errors
from envbuild.image.layers.dist_info import remove_leftovers
from envbuild.image.scan.packages import python_package


def strip(venv: Path, site_packages: Path) -> None:
    """Remove what depends on the building machine, also from the lists of installed files."""
    with machine_errors(venv):
        remove_leftovers(venv, site_packages)


def distributions(site_packages: Path) -> dict[str, str]:
    """Version by canonical name of every installed distribution."""
    files = ((folder.name, folder / "METADATA") for folder in site_packages.glob("*.dist-info"))
    packages = (python_package(name, {"METADATA": file.read_bytes()}) for name, file in files)
    return dict(sorted((item.name, item.version) for item in packages if item))


def check_against(locked: Mapping[str, str], installed: Mapping[str, str]) -> None:
    """Compare what is installed with what is locked.

    Raises:
        CheckRefusedError: they differ.
    """
    wanted = {str(canonicalize_name(name)): version for name, version in locked.items()}
    if not wanted:
        raise InternalError("the lock has no packages", why="Its requirement files are empty.", fix="Lock again.")
    differing = [
        f"{name}: locked {wanted.get(name, 'not')}, installed {installed.get(name, 'not')}"
        for name in sorted({*wanted, *installed})
        if wanted.get(name) != installed.get(name)
    ]
    if differing:
        raise CheckRefusedError(
            "the environment is not what was locked",
            why="\n".join(differing),
            fix="Lock again with --upgrade; if it stays, report it with the lock.",
        )
