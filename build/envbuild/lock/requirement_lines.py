"""Pinned requirements as uv writes them: each with its hashes and with who needs it on the indented lines below."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from packaging.utils import canonicalize_name

_BEGINNING = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)
# `name[extra]==1.0 ; marker`, `name @ git+URL@COMMIT`, `name @ https://FILE`.
_PINNED = re.compile(
    r"^(?P<name>[A-Za-z0-9][\w.-]*)(\[[^]]*\])?\s*(==\s*(?P<version>[^\s;]+)|@\s*git\+\S+@(?P<commit>\w+)|@\s*\w+://)"
)
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]+)")
# `# via NAME`, or `# via` and then one `#   NAME` a line.
_VIA = re.compile(r"^[ \t]+#(?: via +| {2,})(\S+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class PinnedRequirement:
    """A requirement that takes one version, commit or file.

    Attributes:
        name: in its canonical form.
        version: empty where only a commit or an address is stated.
        commit: of what comes from git.
        hashes: of its files, ``sha256:...``; none for what comes from git.
        needed_by: the packages that ask for it.
        text: its lines.
    """

    name: str
    version: str
    commit: str | None
    hashes: frozenset[str]
    needed_by: tuple[str, ...]
    text: str


def read_requirements(text: str) -> list[PinnedRequirement]:
    """The requirements of a file, in its order."""
    listed = []
    for block in _BEGINNING.split(text):
        if (match := _PINNED.match(block)) is not None:
            requirement = PinnedRequirement(
                name=canonicalize_name(match["name"]),
                version=match["version"] or "",
                commit=match["commit"],
                hashes=frozenset(_HASH.findall(block)),
                needed_by=tuple(_VIA.findall(block)),
                text=block.rstrip(),
            )
            listed.append(requirement)
    return listed


def read_pins(text: str) -> dict[str, str]:
    """``name -> version`` of the requirements of a file that state one."""
    return {requirement.name: requirement.version for requirement in read_requirements(text) if requirement.version}


def pinned_package(line: str) -> str:
    """The package that a line of requirements pins; empty for other lines."""
    return next((requirement.name for requirement in read_requirements(line)), "")


def without_packages(text: str, packages: Collection[str]) -> str:
    """Requirements without these packages and what is below them."""
    return "".join(block for block in _BEGINNING.split(text) if pinned_package(block) not in packages)
