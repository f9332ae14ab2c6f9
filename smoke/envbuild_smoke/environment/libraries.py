"""Shared libraries of which one process must have one copy: where they lie, and which are mapped."""

import os
import re
import subprocess
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


def reachable(folders: Iterable[str]) -> dict[str, list[str]]:
    """Return the libraries under the folders of packages, on LD_LIBRARY_PATH and in ldconfig's cache, by name.

    Files that are one and the same under several names count once.
    """
    files = [file for folder in folders for file in _below(folder)]
    # Not below these folders: the loader does not descend.
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        if Path(folder).is_dir():
            files += [entry.path for entry in os.scandir(folder)]
    files += _loader_cache()
    named: dict[str, list[str]] = {}
    for file in files:
        if name := soname(file):
            named.setdefault(name, []).append(file)
    return {name: sorted(distinct(paths)) for name, paths in sorted(named.items())}


def merged(sources: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, tuple[str, ...]]:
    """Return the files that any of the sources has, by name."""
    together: dict[str, set[str]] = {}
    for source in sources:
        for name, paths in source.items():
            together.setdefault(name, set()).update(paths)
    return {name: tuple(sorted(paths)) for name, paths in sorted(together.items())}


def twice(*sources: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the libraries of which the sources together know more than one file."""
    together = {name: distinct(paths) for name, paths in merged(sources).items()}
    return {name: sorted(paths) for name, paths in together.items() if len(paths) > 1}


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


def _loader_cache() -> list[str]:
    # /sbin is not on the PATH of every user.
    for program in ("ldconfig", "/sbin/ldconfig"):
        try:
            answer = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.SubprocessError):
            continue
        lines = answer.stdout.splitlines()
        return [line.partition("=> ")[2].strip() for line in lines if "=> " in line]
    return []
