"""What a lock holds, package by package, and what the same packages are in other lock formats."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from envbuild.core import tomlread
from envbuild.lock.lockfile import LockDirectory
from envbuild.lock.uv.resolution import package_files

_PINNED = re.compile(
    r"^(?P<name>[A-Za-z0-9][\w.-]*)(\[[^]]*\])?\s*(==\s*(?P<version>[^\s;]+)|@\s*git\+\S+@(?P<commit>\w+)|@\s*\w+://)"
)
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]+)")


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package of a lock.

    Attributes:
        version: empty where only a commit is known.
        hashes: of its files, ``sha256:...``; none for what comes from git.
        commit: the commit of what comes from git.
        local: a wheel in a folder of this machine, which uv may leave without a hash.
    """

    version: str = ""
    hashes: frozenset[str] = frozenset()
    commit: str | None = None
    local: bool = False


Content = Mapping[str, Package]


def locked_content(lock: LockDirectory, phases: Collection[str]) -> dict[str, Package]:
    """The packages of some phases of a lock, by canonical name."""
    components = lock.lock.components.items()
    direct = {canonicalize_name(name): item.version for name, item in components if item.commit or item.url}
    found: dict[str, Package] = {}
    for phase in phases:
        if (file := lock.file(phase)) is None:
            continue
        for block in re.split(r"^(?=[A-Za-z0-9])", file.read_text(), flags=re.MULTILINE):
            if (match := _PINNED.match(block)) is None:
                continue
            name = canonicalize_name(match["name"])
            found[name] = Package(
                version=match["version"] or direct.get(name, ""),
                hashes=frozenset(_HASH.findall(block)),
                commit=match["commit"],
            )
    return found


def of_uv_lock(text: str) -> dict[str, Package]:
    """The packages of a uv.lock, the project itself left out."""
    found: dict[str, Package] = {}
    for package in tomlread.loads(text).get("package", []):
        source = package["source"]
        if "virtual" in source:
            continue
        found[canonicalize_name(package["name"])] = Package(
            version=package["version"],
            hashes=_hashes(file.get("hash") for file in package_files(package)),
            commit=source["git"].rpartition("#")[2] if "git" in source else None,
            local=any("://" not in file.get("url", "") or "path" in file for file in package_files(package)),
        )
    return found


def of_pylock(text: str) -> dict[str, Package]:
    """The packages of a pylock.toml."""
    found: dict[str, Package] = {}
    for package in tomlread.loads(text).get("packages", []):
        # An address is an archive there, whatever kind of file it is.
        files = [*package_files(package), *([package["archive"]] if "archive" in package else [])]
        found[canonicalize_name(package["name"])] = Package(
            version=package.get("version", ""),
            hashes=_hashes(f"sha256:{digest}" for file in files if (digest := file["hashes"].get("sha256"))),
            commit=package["vcs"]["commit-id"] if "vcs" in package else None,
        )
    return found


def _hashes(values: Iterable[str | None]) -> frozenset[str]:
    return frozenset(value for value in values if value)
