"""What trying a finished lock shows: whether its packages install and its modules import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from envbuild.catalog.catalog import Selection
from envbuild.lock.checks.findings import CheckFinding
from envbuild.lock.lockfile import LockDirectory

# What a record says in the place of where, of a lock that is verified unless that is turned off (--no-verify).
UNVERIFIED = "nowhere: not verified"


@dataclass(frozen=True, kw_only=True)
class VerifiedLock:
    """A lock that was installed, and its modules imported.

    Attributes:
        where: for people: ``base debian13-cu130``, ``this machine (glibc 2.36, Python 3.12.1)``.
        imported: the modules that import.
        not_checked: the modules of which nothing is known, each with the reason.
        findings: what does not install or import.
        stubbed: packages of which a stub was there instead of the compiled module, whose wheel is not built.
        base_image: the digest of the image of the lock's own base, where that was the place.
        base_made_at: when that base was made; empty where that is not known.
    """

    where: str
    imported: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    findings: tuple[CheckFinding, ...] = ()
    stubbed: tuple[str, ...] = ()
    base_image: str = ""
    base_made_at: str = ""


# Installs a lock somewhere and imports its modules.
Verify: TypeAlias = Callable[[Selection, LockDirectory], VerifiedLock]
