"""Looks packages up in the index: which version, which files and which dates uv finds for them alone."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from packaging.utils import canonicalize_name

from envbuild.catalog.models import MACHINES, Base
from envbuild.core.files import machine_errors
from envbuild.lock.context import WorkContext
from envbuild.lock.uv.resolution import resolve
from envbuild.lock.uv.torch_builds import TorchSource


def limits(base: Base) -> dict[str, object]:
    """The keys of ``[tool.uv]`` that keep a resolution to what a base can install."""
    marker = (
        f"sys_platform == 'linux' and platform_machine == '{MACHINES[base.platform]}' "
        "and implementation_name == 'cpython'"
    )
    return {"environments": [marker], "minimum-libc-version": {"glibc": base.glibc}}


def look_up(
    packages: Mapping[str, str],
    base: Base,
    settings: Mapping[str, object],
    what: str,
    context: WorkContext,
    *,
    alone: bool = True,
) -> dict[str, Mapping[str, Any]]:
    """Lock packages by themselves: finds versions, files, dates. By package name.

    Args:
        packages: specifiers by name.
        settings: keys of ``[tool.uv]`` besides the base's limits.
        alone: as if they needed nothing.
    """
    with machine_errors(context.folder):
        folder = Path(tempfile.mkdtemp(dir=context.folder, prefix="throw-away."))
    tables = tomlkit.aot()
    for name in packages if alone else ():
        table = tomlkit.table()
        table["name"], table["requires-dist"] = name, []
        tables.append(table)
    document = tomlkit.document()
    document["project"] = {
        "name": "envbuild-throw-away",
        "version": "0",
        "requires-python": f"=={base.python.version}.*",
        "dependencies": [f"{name}{specifier}" for name, specifier in packages.items()],
    }
    document["tool"] = {"uv": {"package": False, **limits(base), **settings}}
    if alone:
        document["tool"]["uv"]["dependency-metadata"] = tables
    with machine_errors(folder):
        (folder / "pyproject.toml").write_text(tomlkit.dumps(document))
    resolution = resolve(folder, TorchSource("package-index", None), what, context)
    return {canonicalize_name(package["name"]): package for package in resolution.uv_lock["package"]}
