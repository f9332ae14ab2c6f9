"""Stubs of extension modules whose wheels are not built yet, so that the Python code around them can be imported."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from envbuild.catalog.data import data_root
from envbuild.core.files import machine_errors

PROGRAM = "containers/native/extension_stubs.py"
MODULE = "envbuild_extension_stubs"
# An extension of Python's stable interface has no version in its name (importlib.machinery.EXTENSION_SUFFIXES).
# Transformer Engine before 2.3 looks for transformer_engine_torch.*.so, with something between the dots.
SUFFIX = ".abi3.so"


def write_stubs(
    modules: Mapping[str, str],
    versions: Mapping[str, str],
    site_packages: Path,
    code: Mapping[str, Sequence[Path]] = MappingProxyType({}),
) -> None:
    """Make an environment take packages for installed, with a stub of the extension module of each.

    Only for an environment that is thrown away: every Python process in it has the stubs.

    Args:
        modules: the extension module by package, in canonical names.
        versions: the version of each package.
        code: the folders with the Python code around its module, by package.
    """
    if not modules:
        return
    with machine_errors(site_packages):
        (site_packages / f"{MODULE}.py").write_bytes((data_root() / PROGRAM).read_bytes())
        # Python runs lines of .pth files that begin with import (https://docs.python.org/3/library/site.html).
        names = tuple(sorted(modules.values()))
        (site_packages / f"{MODULE}.pth").write_text(f"import {MODULE}; {MODULE}.install({names!r})\n")
        for package, module in modules.items():
            file = f"{module}{SUFFIX}"
            (site_packages / file).touch()
            info = site_packages / f"{package.replace('-', '_')}-{versions[package]}.dist-info"
            info.mkdir()
            metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {versions[package]}\n"
            (info / "METADATA").write_text(metadata)
            # By RECORD a failed import is told to a package (InstalledPackages). Hash and size may be empty (PEP 376).
            files = [file, f"{info.name}/METADATA", f"{info.name}/RECORD"]
            for folder in code.get(package, ()):
                copied = Path(shutil.copytree(folder, site_packages / folder.name))
                files += [str(path.relative_to(site_packages)) for path in copied.rglob("*") if path.is_file()]
            (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
