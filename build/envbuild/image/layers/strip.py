"""Removes what depends on the building machine, and compares what is installed with the lock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.core.errors import CheckRefusedError, InternalError
from envbuild.core.files import machine_errors
from envbuild.image.layers.dist_info import remove_leftovers


def strip(venv: Path, site_packages: Path) -> None:
    """Remove what depends on the building machine, also from the lists of installed files."""
    with machine_errors(venv):
        remove_leftovers(venv, site_packages)


def distributions(site_packages: Path) -> dict[str, str]:
    """Version by canonical name of every installed distribution."""
    found: dict[str, str] = {}
    for folder in site_packages.glob("*.dist-info"):
        fields: dict[str, str] = {}
        for line in (folder / "METADATA").read_text(encoding="utf-8", errors="replace").splitlines():
            if not line.strip():
                break  # the description follows
            key, _, value = line.partition(": ")
            fields.setdefault(key, value.strip())
        found[canonicalize_name(fields["Name"])] = fields["Version"]
    return dict(sorted(found.items()))


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
