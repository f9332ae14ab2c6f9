"""Shared libraries of which one process must have one copy: which are mapped, and which the packages have."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# Two of these in one process disagree about their own state. CUDA's runtime is not among them: a base may
# bring its own in addition to that of the packages, and each library finds the one that it was linked to.
_SINGLE = re.compile(r"lib(?:nccl|cudnn|torch|torch_cpu|torch_cuda|torch_python|c10|c10_cuda)\.so(?:\.\d+)?")
# libnccl.so.2.27.3 and libnccl.so.2.29.7 have one soname: the loader takes either for the other.
_VERSIONED = re.compile(r"(lib[\w+-]+\.so(?:\.\d+)?)(?:\.\d+)*")


def soname(file: str) -> str | None:
    """Return "libnccl.so.2" for "/x/libnccl.so.2.29.7"; None for a library that may be there twice."""
    match = _VERSIONED.fullmatch(file.rpartition("/")[2])
    return match[1] if match and _SINGLE.fullmatch(match[1]) else None


def mapped() -> dict[str, tuple[str, ...]]:
    """Return the files of these libraries that this process has mapped, by name."""
    libraries: dict[str, set[str]] = {}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        # proc(5): address, permissions, offset, device, inode, path; the path may have spaces.
        path = line.split(maxsplit=5)[5:]
        if path and (name := soname(path[0])):
            libraries.setdefault(name, set()).add(path[0])
    return {name: tuple(sorted(paths)) for name, paths in sorted(libraries.items())}


def packaged(folders: Iterable[str]) -> dict[str, list[str]]:
    """Return the libraries under the folders of packages, by name."""
    named: dict[str, list[str]] = {}
    for file in (file for folder in folders for file in _below(folder)):
        if name := soname(file):
            named.setdefault(name, []).append(file)
    return named


def merged(sources: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, tuple[str, ...]]:
    """Return the files that any of the sources has, by name."""
    together: dict[str, set[str]] = {}
    for source in sources:
        for name, paths in source.items():
            together.setdefault(name, set()).update(paths)
    return {name: tuple(sorted(paths)) for name, paths in sorted(together.items())}


def twice(own: Mapping[str, Sequence[str]], loaded: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the libraries of which a process has mapped several files, or another one than the packages' `own`.

    A machine may have others, which nothing loads.
    """
    result = {}
    for name, paths in loaded.items():
        packages, mapped_files = distinct(own.get(name, ())), distinct(paths)
        together = distinct([*packages, *mapped_files])
        if len(mapped_files) > 1 or len(together) > max(1, len(packages)):
            result[name] = sorted(together)
    return result


def distinct(paths: Iterable[str]) -> list[str]:
    """Return the files that exist, each once though it may have several names."""
    files: dict[tuple[int, int], str] = {}
    for path in paths:
        with suppress(OSError):
            status = Path(path).stat()
            files.setdefault((status.st_dev, status.st_ino), path)
    return list(files.values())


def _below(folder: str) -> list[str]:
    # Headers and sources have no libraries among them, and are most of the files.
    skipped = {"include", "__pycache__", "tests", "share"}
    paths = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped]
        paths += [f"{root}/{file}" for file in files if ".so" in file]
    return paths
