"""The files of installed packages compared with RECORD, and with what would be imported.

A wheel's RECORD has the name, hash and size of each of its files. Compared are: that each file is there; the
size of each; the hash of Python sources and shared libraries up to `HASHED_BYTES`. Left out: hashes of larger
libraries and of other files, packages without a RECORD (those of the base, mostly), and what installers
write themselves (bytecode, scripts, their own notes).
"""

import base64
import csv
import hashlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from envbuild_smoke.environment.distributions import distributions, normalize
from envbuild_smoke.results import Finding

# Reading more takes minutes from a network disk (torch for CUDA has one of 1 GB); a library this large that was
# exchanged has, but for a rare chance, another size.
HASHED_BYTES = 512 << 20
_CHUNK_BYTES = 1 << 20
_HASHED_SUFFIXES = (".py", ".so")
# A broken package is broken in thousands of places: the first few are enough.
_MOST_OF_A_KIND = 5


@dataclass(frozen=True, kw_only=True)
class RecordedFile:
    """A file as RECORD lists it; hash ("sha256=...") and size may be absent."""

    package: str
    name: str
    path: str
    digest: str
    size: int | None


def recorded(packages: Iterable[str]) -> dict[str, list[RecordedFile]]:
    """Return the files of the packages that are installed with a RECORD, by normalized name."""
    installed = distributions()
    versions = {}
    for name in sorted(map(normalize, packages)):
        # One without a RECORD may be earlier on the path: then `shadowed` reports its modules.
        for distribution in installed.get(name, []):
            if text := distribution.read_text("RECORD"):
                versions[name] = list(_rows(name, str(distribution.locate_file("")), text))
                break
    return versions


def file_findings(files: dict[str, list[RecordedFile]]) -> list[Finding]:
    """Return `file-missing` and `file-differs` for the files of each package.

    Where several packages list a file, each with other content, it must be that of one of them; and where one of them
    requires the others, its own, which is meant to lie over theirs.
    """
    owners: dict[str, list[RecordedFile]] = {}
    for file in (file for package in files.values() for file in package):
        owners.setdefault(file.path, []).append(file)
    requires = _requirements() if any(len(listed) > 1 for listed in owners.values()) else {}
    wanted = [_uppermost(listed, requires) for listed in owners.values()]
    with ThreadPoolExecutor(max_workers=min(8, len(os.sched_getaffinity(0)) * 2)) as threads:
        problems = [problem for problem in threads.map(_problem_of_all, wanted, chunksize=64) if problem]
    return shortened(problems)


def _requirements() -> dict[str, set[str]]:
    """Return the packages that each installed one requires, by normalized name."""
    return {
        name: {normalize(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in installed[0].requires or []}
        for name, installed in distributions().items()
    }


def _uppermost(listed: list[RecordedFile], requires: Mapping[str, set[str]]) -> list[RecordedFile]:
    """Return a file as those packages list it that none of the others requires."""
    required = {name for file in listed for name in requires.get(file.package, ())}
    return [file for file in listed if file.package not in required] or listed


def _problem_of_all(listed: list[RecordedFile]) -> Finding | None:
    """Return what is wrong with a file where it is that of none of the packages that list it."""
    problems = [_problem(file) for file in listed]
    return problems[0] if all(problems) else None


def shadowed(
    files: dict[str, list[RecordedFile]],
    path: Sequence[str] | None = None,
    imported: Mapping[str, str | None] | None = None,
) -> list[Finding]:
    """Return `shadowed` for modules of the packages that come from a file that none of them lists.

    Those that would be imported from `path` (by default sys.path), and the files of those that were, by package.
    """
    listed = {os.path.realpath(file.path) for package in files.values() for file in package}
    folders = sys.path if path is None else list(path)
    modules: list[tuple[str, str | None, str | None]] = [
        (package, expected, _origin(module, folders))
        for package, entries in files.items()
        for module, expected in _modules(entries).items()
    ]
    modules += [(package, None, file) for package, file in (imported or {}).items() if package in files]
    return [
        Finding("shadowed", package, expected, origin)
        for package, expected, origin in modules
        # Without an origin it is a namespace, whose parts may lie anywhere.
        if origin and Path(origin).is_absolute() and os.path.realpath(origin) not in listed
    ]


def _origin(module: str, folders: Sequence[str]) -> str | None:
    """Return the file a module would be imported from, without importing anything."""
    spec = None
    for part in module.split("."):
        # PathFinder and not importlib.util.find_spec: that imports the parents, and looks at what this process has
        # imported. By the last name alone: of a namespace in a namespace it would look up the parent in sys.modules.
        spec = importlib.machinery.PathFinder.find_spec(part, list(folders))
        if spec is None:
            return None
        folders = _locations(spec, part, folders)
    return spec.origin if spec else None


def _locations(spec: importlib.machinery.ModuleSpec, name: str, folders: Sequence[str]) -> list[str]:
    """Return where the modules of a package are; of a namespace, every folder of its name."""
    if spec.origin is not None:
        return list(spec.submodule_search_locations or [])
    return [str(path) for folder in folders if (path := Path(folder, name)).is_dir()]


def _modules(files: Sequence[RecordedFile]) -> dict[str, str]:
    """Return the top modules of a package (`megatron.core` in a namespace), each with the file it is imported from."""
    packages = {file.name.removesuffix("/__init__.py"): file for file in files if file.name.endswith("/__init__.py")}
    modules: dict[str, str] = {}
    for name, file in packages.items():
        parts = name.split("/")
        inside = any("/".join(parts[:length]) in packages for length in range(1, len(parts)))
        if not inside and all(part.isidentifier() for part in parts):
            modules[".".join(parts)] = file.path
    for file in files:
        if "/" not in file.name and file.name.endswith(_HASHED_SUFFIXES):
            module = file.name.split(".", maxsplit=1)[0]
            if module.isidentifier():
                modules[module] = file.path
    return modules


def _rows(package: str, root: str, text: str) -> Iterator[RecordedFile]:
    for row in csv.reader(text.splitlines()):
        # Paths, hashes and sizes (packaging.python.org, recording installed packages); RECORD's own line has neither
        # hash nor size.
        if len(row) == 3 and row[0]:
            size = int(row[2]) if row[2].isdigit() else None
            path = f"{root}/{row[0]}"
            yield RecordedFile(package=package, name=row[0], path=path, digest=row[1], size=size)


def _problem(file: RecordedFile) -> Finding | None:
    # Bytecode comes and goes; scripts get the path of their interpreter; notes about the installation have no hash.
    if not file.digest or file.name.endswith(".pyc") or file.name.startswith("../"):
        return None
    try:
        size = Path(file.path).stat().st_size
        difference = None if ".dist-info/" in file.name else _difference(file, size)
    except FileNotFoundError:
        return Finding("file-missing", file.package, file.path, None)
    except OSError as error:
        difference = (file.digest, error.strerror or str(error))
    if difference is None:
        return None
    expected, actual = difference
    return Finding("file-differs", file.package, expected, f"{file.path}: {actual}")


def _difference(file: RecordedFile, size: int) -> tuple[str, str] | None:
    """Return what was recorded of a file and what it is, or None when there is no difference."""
    if file.size is not None and size != file.size:
        return f"{file.size} bytes", f"{size} bytes"
    algorithm, _, expected = file.digest.partition("=")
    if size > HASHED_BYTES or algorithm != "sha256" or not _is_hashed(file.name):
        return None
    # RECORD writes hashes in URL-safe base64 without padding.
    actual = base64.urlsafe_b64encode(_digest(file.path)).decode().rstrip("=")
    return None if actual == expected else (file.digest, f"sha256={actual}")


def _digest(path: str) -> bytes:
    digest = hashlib.sha256()
    with Path(path).open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def _is_hashed(name: str) -> bool:
    # Also "libcudnn.so.9".
    return name.endswith(_HASHED_SUFFIXES) or ".so." in name.rpartition("/")[2]


def shortened(problems: list[Finding]) -> list[Finding]:
    """Return the first few of each package and kind, and how many more there are."""
    kept: dict[tuple[str | None, str], list[Finding]] = {}
    for problem in problems:
        kept.setdefault((problem.package, problem.code), []).append(problem)
    findings = []
    for group in kept.values():
        findings += group[:_MOST_OF_A_KIND]
        if len(group) > _MOST_OF_A_KIND:
            more = f"{len(group) - _MOST_OF_A_KIND} more of its files"
            findings.append(Finding(group[0].code, group[0].package, None, more))
    return findings
