"""Which package of an environment has a file or a module."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name

FOLDERS = ("/site-packages/", "/dist-packages/")
_CODE = (".py", ".so", ".pyd")


class InstalledPackages:
    """The packages of an environment, by the files that their ``RECORD`` lists.

    Attributes:
        names: the packages, by canonical name.
    """

    def __init__(self, site_packages: Path) -> None:
        self._records = {
            # NAME-VERSION.dist-info: in both a dash became an underscore (PEP 427).
            canonicalize_name(folder.name.removesuffix(".dist-info").rpartition("-")[0]): folder / "RECORD"
            for folder in sorted(site_packages.glob("*.dist-info"))
        }
        self.names = frozenset(self._records)

    def of_file(self, path: str) -> str:
        """The package that a file belongs to, which may be named by another place's path; empty if there is none."""
        relative = inside(path)
        if not relative:
            return ""
        # Files that were written after the installation (compiled helpers, say) are in no RECORD.
        return self._files.get(relative) or self.of_module(relative.rpartition(".")[0].replace("/", "."))

    def of_module(self, module: str) -> str:
        """The package that has a module, or the nearest package around it; empty if there is none, or several."""
        parts = module.split(".")
        for count in range(len(parts), 0, -1):
            owners = self._modules.get(".".join(parts[:count]), set())
            if len(owners) == 1:
                return next(iter(owners))
        return ""

    def is_shared(self, folder: str) -> bool:
        """Whether several packages have their modules in a folder (a namespace, such as ``google``)."""
        return len(self._modules.get(folder, ())) > 1

    @cached_property
    def _files(self) -> dict[str, str]:
        return {path: name for name, record in self._records.items() for path in _paths(record)}

    @cached_property
    def _modules(self) -> dict[str, set[str]]:
        """The owners of each module, and of each folder that holds modules."""
        owners: dict[str, set[str]] = {}
        regular: dict[str, str] = {}
        for path, name in self._files.items():
            parts = PurePosixPath(path)
            if not path.endswith(_CODE):
                continue
            # Of module.cpython-312-x86_64-linux-gnu.so the module alone.
            stem = parts.name.partition(".")[0]
            folder = ".".join(parts.parent.parts)
            if stem == "__init__":
                regular[folder] = name
            else:
                owners.setdefault(f"{folder}.{stem}".removeprefix("."), set()).add(name)
            for count in range(1, len(parts.parent.parts) + 1):
                owners.setdefault(".".join(parts.parts[:count]), set()).add(name)
        # A package with an __init__.py has one owner, even if others put files into its folder.
        return owners | {module: {name} for module, name in regular.items()}


def inside(path: str) -> str:
    """A file's path below the folder that packages are installed in; empty where it is in none."""
    start = max((path.rfind(folder) + len(folder) for folder in FOLDERS if folder in path), default=0)
    return path[start:] if start else ""


def _paths(record: Path) -> Iterator[str]:
    try:
        with record.open(newline="", encoding="utf-8", errors="replace") as stream:
            # A RECORD is CSV: a path with a comma in it is in quotes (PEP 376).
            yield from (row[0] for row in csv.reader(stream) if row)
    except OSError:
        # RECORD may be missing (PyPA, "Recording installed projects").
        return
