"""Which packages a failed import, or a failed installation, is about: read from what was printed."""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name

from envbuild.core.exit_status import tail

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


TRACEBACK = "Traceback (most recent call last):"
DIRECT_CAUSE = "The above exception was the direct cause of the following exception:"
# faulthandler's stacks: of a crash, which names its thread, and of an import that does not end, whose own is the last.
_FRAMES = r"most recent call first\):\n((?: +File .*\n?)+)"
_CRASH = re.compile(rf"^Current thread .*{_FRAMES}", re.MULTILINE)
_LAST_STACK = re.compile(rf"(?s:.*){_FRAMES}")
_FRAME = re.compile(r'^ *File "([^"\n]+)", line \d+', re.MULTILINE)
FRAME_PACKAGES = 2
MEANWHILE = "During handling of the above exception, another exception occurred:"
_IMPORT_ERROR = re.compile(r"^ImportError: ", re.MULTILINE)

_MISSING = re.compile(r"No module named '?([\w.]+)'?")
_NO_METADATA = re.compile(
    r"No package metadata was found for ([\w.-]+)|The '([\w.-]+)[^']*' distribution was not found"
)
_MODULES = (
    re.compile(r"module '([\w.]+)' (?:\([^)]*\) )?has no attribute"),
    re.compile(r"cannot import name '[^']*' from (?:partially initialized module )?'([\w.]+)'"),
    # Of extensions built for another NumPy: "numpy.dtype size changed", "numpy.core.multiarray failed to import".
    re.compile(r"\b([a-z_]\w*)(?:\.\w+)+ size changed, may indicate binary incompatibility"),
    re.compile(r"\b([a-z_]\w*)(?:\.\w+)+ failed to import"),
)
_PATH = re.compile(rf"[\w./+-]*(?:{'|'.join(FOLDERS)})[\w./+-]+")
# `huggingface-hub>=0.34.0`, `NumPy 2.3`, `numba version 0.61`
_VERSIONED = re.compile(r"\b([A-Za-z][\w.-]*?)(?:\[[\w,-]*\])? ?(?:(?:[<>!=~]=?=?|version) ?)?v?\d+\.", re.ASCII)
# An error's line, and that of a build system whose command failed: the command's own error is above it.
_ERROR = re.compile(r"\b\w*(?:Error|Exception|error): ")
_COMMAND_FAILED = re.compile(r"CalledProcessError|error: Command '\[|\bcommand .* failed\b", re.IGNORECASE)
# Of a path in the sandbox or in a place of builds only the last part says something.
_FOLDERS = re.compile(r"(?:/[\w.+@-]+)*/(?:envbuild|tmp|builds-v\d+)/(?:[\w.+@-]+/)*")
MOST_CHARACTERS = 240
# What uv puts a package's name into: `foo==1.0`, `foo @ git+https://...`, `foo` (v1.0)
_UV_PACKAGE = re.compile(r"`([A-Za-z0-9][\w.-]*)(?:\[[^\]`]*\])?(?: ?(?:==|@)[^`]*)?`")


@dataclass(frozen=True, kw_only=True)
class FailurePackages:
    """What a failure is about.

    Attributes:
        packages: canonical names: first those that the error names, then those whose code was running, innermost first.
        missing_module: a module that no package of the environment has.
    """

    packages: tuple[str, ...] = ()
    missing_module: str = ""


def of_import(output: str, installed: InstalledPackages) -> FailurePackages:
    """The packages that a failed import is about.

    Args:
        output: all that the process printed, with Python's traceback, or with faulthandler's stack.
    """
    errors = _errors(output)
    named = [name for error in errors for name in _named(error.message, installed)]
    # Of an error and its causes the first is where things went wrong; one without packages says less than the next.
    running = next((names for error in errors if (names := _innermost(error.frames, installed))), [])
    missing = next((module for error in errors if (module := _missing(error.message, installed))), "")
    return FailurePackages(packages=_distinct([*named, *running[:FRAME_PACKAGES]]), missing_module=missing)


def of_installation(output: str, locked: Collection[str]) -> tuple[str, ...]:
    """The locked packages that uv names where it does not install or build something."""
    names = (canonicalize_name(match[1]) for match in _UV_PACKAGE.finditer(_uv_failure(output)))
    return _distinct(name for name in names if name in locked)


def cause_of_installation(output: str) -> str:
    """One line: what uv could not do, and the last error that the tool below it printed, else its last line."""
    # uv draws its causes as a tree.
    lines = [line.strip(" \u00d7├╰─▶│") for line in _uv_failure(output).splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines[1:] if _ERROR.search(line) and not _COMMAND_FAILED.search(line)]
    cause = "; ".join(dict.fromkeys([*lines[:1], *(errors or lines)[-1:]])) or tail(output, lines=1).strip()
    return textwrap.shorten(_FOLDERS.sub("", cause), MOST_CHARACTERS, placeholder=" ...")


def _uv_failure(output: str) -> str:
    """What uv says of its failure: the lines about its progress name packages, too, and so do its hints."""
    # The last one: a log begins with the attempt that was made without the network.
    match = re.search(r"(?s:.*)^(?: *\u00d7 |error: )((?s:.*?))(?:^ *hint: |\Z)", output, re.MULTILINE)
    return match[1] if match else ""


@dataclass(frozen=True)
class _Error:
    """An exception: the files of its calls, innermost first, and its text."""

    frames: list[str]
    message: str


def _errors(output: str) -> list[_Error]:
    """The exception that ended the import and what it was raised from, the first cause first."""
    _, *texts = output.split(TRACEBACK)
    last = texts[-1] if texts else output
    if stack := _CRASH.search(last) or _LAST_STACK.search(last):
        return [_Error(_FRAME.findall(stack[1]), "")]
    if not texts:
        return [_Error([], output)]
    chain = [last]
    # An exception that is only raised while another one is handled is an error of its own; but an ImportError in the
    # place of a missing module says less than that (megatron-core 0.12: "mamba-ssm is required by the Mamba model").
    for earlier in reversed(texts[:-1]):
        if DIRECT_CAUSE in earlier:
            chain.insert(0, earlier.partition(DIRECT_CAUSE)[0])
        elif _MISSING.search(earlier) and _IMPORT_ERROR.search(chain[0]):
            chain.insert(0, earlier.partition(MEANWHILE)[0])
        else:
            break
    return [_error(text) for text in chain]


def _error(text: str) -> _Error:
    frames = list(_FRAME.finditer(text))
    after = text[frames[-1].end() :] if frames else text
    # The source line and the marks under it are indented; the exception is not.
    _, *message = re.split(r"\n(?=\S)", after, maxsplit=1)
    return _Error([frame[1] for frame in reversed(frames)], message[0] if message else "")


def _innermost(files: Iterable[str], installed: InstalledPackages) -> list[str]:
    """The packages whose code was running, innermost first."""
    return [*dict.fromkeys(name for path in files if (name := installed.of_file(path)))]


def _named(message: str, installed: InstalledPackages) -> Iterator[str]:
    for match in _MISSING.finditer(message):
        yield installed.of_module(match[1])
    for pattern in _MODULES:
        for match in pattern.finditer(message):
            yield installed.of_module(match[1])
    for match in _PATH.finditer(message):
        yield installed.of_file(match[0])
    for match in _VERSIONED.finditer(message):
        name = canonicalize_name(match[1])
        yield name if name in installed.names else ""


def _missing(message: str, installed: InstalledPackages) -> str:
    """The module that no package has."""
    for match in _MISSING.finditer(message):
        if not installed.of_module(match[1]):
            # Of a namespace that several packages share, the whole name says which one is missing.
            top = match[1].partition(".")[0]
            return match[1] if installed.is_shared(top) else top
    for match in _NO_METADATA.finditer(message):
        name = match[1] or match[2]
        if canonicalize_name(name) not in installed.names:
            return name
    return ""


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))
