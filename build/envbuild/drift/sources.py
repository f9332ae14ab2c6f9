"""The Python sources of one distribution, read from its wheel; nothing is unpacked."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from functools import cached_property
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name

from envbuild.core.errors import CheckRefusedError

# Not part of what a distribution offers, although some wheels install them as top-level packages.
_NOT_THE_PACKAGE = frozenset({"tests", "test", "examples", "scripts", "docs", "benchmarks", "tools", "3rdparty"})
_COMPILED = (".so", ".pyd")
# Every class whose name ends so: setuptools' Extension, torch's CUDAExtension, Pybind11Extension.
_EXTENSION = re.compile(r"""Extension\(\s*(?:name\s*=\s*)?["']([\w.]+)["']""")


@dataclass(frozen=True, eq=False)
class SourceTree:
    """The sources of a distribution.

    Attributes:
        name: normalized name of the distribution.
        files: content of every ``.py`` file by its path below the import root (``megatron/core/utils.py``).
        compiled: dotted names of modules that are compiled extensions: they exist, and cannot be read.
    """

    name: str
    version: str
    files: Mapping[str, bytes]
    compiled: frozenset[str] = frozenset()

    @classmethod
    def from_wheel(cls, path: Path) -> SourceTree:
        """Read a wheel.

        Raises:
            CheckRefusedError: it is not a wheel.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
                metadata = next((archive.read(name) for name in names if _is_metadata(name)), b"")
                content = {name: archive.read(name) for name in names if name.endswith(".py")}
        # zipfile raises RuntimeError for an encrypted member.
        except (OSError, zipfile.BadZipFile, RuntimeError) as error:
            raise _unreadable(path, error) from error
        name, version = _identity(metadata, path)
        files = {_below_data(file).removeprefix("src/"): text for file, text in content.items()}
        # Compiled modules have names, and nothing that can be read: whatever is asked of them is not judged.
        compiled = frozenset(_dotted(file.removeprefix("src/")) for file in names if file.endswith(_COMPILED))
        return cls(name, version, {file: text for file, text in files.items() if _belongs(file)}, compiled)

    @property
    def title(self) -> str:
        """Name and version, as findings print it."""
        return f"{self.name} {self.version}"

    @cached_property
    def modules(self) -> Mapping[str, str]:
        """Path of the file by dotted module name."""
        return {_dotted(file): file for file in self.files}

    def package_of(self, module: str) -> str:
        """What relative imports in a module start from: itself where it is a package's ``__init__``."""
        is_package = self.modules[module].rpartition("/")[2] == "__init__.py"
        return module if is_package else module.rpartition(".")[0]

    @cached_property
    def roots(self) -> frozenset[str]:
        """The outermost regular packages and modules: what is missing below these is missing.

        A namespace package such as ``megatron`` is not a root: other distributions add to it.
        """
        packages = {_dotted(file) for file in self.files if PurePosixPath(file).name == "__init__.py"}
        # setup.py is at the top of a source tree, and no module of what it installs.
        regular = {*packages, *(module for module in self.modules if "." not in module)} - {"setup"}
        return frozenset(module for module in regular if not any(parent in regular for parent in parents(module)))


def extensions_of(setup: str) -> list[str]:
    """The extension modules that a setup.py names: they are there once the tree is built."""
    return _EXTENSION.findall(setup)


def write_wheel(path: Path, name: str, version: str, content: Mapping[str, bytes]) -> None:
    """Write the files of a source tree, in the flat or the ``src`` layout, so that it can be read as a wheel."""
    with zipfile.ZipFile(path, "w") as archive:
        # What from_wheel reads, and no WHEEL or RECORD: nothing installs it.
        archive.writestr("_.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
        for file, text in content.items():
            archive.writestr(file, text)


def parents(module: str) -> Iterator[str]:
    """The packages that hold a module, the nearest first."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _dotted(file: str) -> str:
    path = PurePosixPath(file)
    # foo.cpython-312-x86_64-linux-gnu.so is module foo.
    parts = [*path.parent.parts, path.name.partition(".")[0]]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _below_data(file: str) -> str:
    """A wheel may keep files to be installed under ``NAME.data/purelib/``."""
    first, _, rest = file.partition("/")
    return rest.partition("/")[2] if first.endswith(".data") else file


def _belongs(file: str) -> bool:
    # The first folder alone: `megatron/core/tools` is part of its package.
    return not _NOT_THE_PACKAGE.intersection(PurePosixPath(file).parts[:-1][:1])


def _is_metadata(name: str) -> bool:
    folder, _, file = name.partition("/")
    return folder.endswith(".dist-info") and file == "METADATA"


def _identity(metadata: bytes, path: Path) -> tuple[str, str]:
    headers = BytesHeaderParser().parsebytes(metadata)
    if not headers["Name"] or not headers["Version"]:
        raise _unreadable(path, "it does not state its name and version")
    return canonicalize_name(headers["Name"]), headers["Version"]


def _unreadable(path: Path, error: object) -> CheckRefusedError:
    return CheckRefusedError(
        f"cannot read the sources in {path.name}",
        why=f"It is not a readable wheel: {error}",
        fix="Fetch it again; if it is damaged at its source, pin another version of the component.",
    )
