"""The files that dpkg lists, on Debian and its derivatives: those of the base's own Python."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

_ROOT = Path("/var/lib/dpkg")
# Only dpkg installs modules there.
MODULES = "/usr/lib/python3/dist-packages/"
# A line of "Conffiles:" in dpkg's status file; "obsolete" marks one that the installed version no longer has.
_SETTING = re.compile(r" (/\S+) ([0-9a-f]{32})(?: obsolete)?")


def lists(file: str) -> bool:
    """Return whether a module's file is one of the distribution's own."""
    real = os.path.realpath(file)
    # The folder alone proves nothing: root can put a file there that no package lists.
    return real.startswith(MODULES) and real in _modules()


def knows(file: str) -> bool:
    """Return whether a file is one of a package of the distribution, changed or not."""
    return os.path.realpath(file) in _digests()


def unchanged(file: str) -> bool:
    """Return whether a file is what the package of the distribution that has it put there."""
    try:
        content = Path(file).read_bytes()
    except OSError:
        return False
    # dpkg keeps no other digest.
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return _digests().get(os.path.realpath(file)) == digest


@cache
def _modules() -> frozenset[str]:
    return frozenset(line for line in _lines("*.list") if line.startswith(MODULES))


@cache
def _digests() -> dict[str, str]:
    """Return what dpkg knows of the files that Python may run as it starts: settings, and files of libpython."""
    digests = {}
    with suppress(OSError):
        for line in (_ROOT / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if match := _SETTING.fullmatch(line):
                digests[match[1]] = match[2]
    # Conffiles, as sitecustomize.py in /etc/python3.11 is, have no line in md5sums: their digests are in the status
    # file.
    for line in _lines("*python3*.md5sums"):
        digest, _, name = line.partition("  ")
        digests[f"/{name}"] = digest
    return digests


def _lines(pattern: str) -> Iterator[str]:
    for path in sorted((_ROOT / "info").glob(pattern)):
        with suppress(OSError):
            yield from path.read_text(encoding="utf-8", errors="replace").splitlines()
