"""What trying a finished lock shows: whether its packages install and its modules import."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from envbuild.catalog.catalog import Selection
from envbuild.core.files import write_atomic
from envbuild.lock import lockfile
from envbuild.lock.checks.findings import CheckFinding, refuse
from envbuild.lock.inputs.request import LockInputs
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


class LockVerifier(Protocol):
    """Installs locks in a place and imports their modules; sync has one."""

    def preparing(self, selection: Selection) -> AbstractContextManager[Callable[[], None]]:
        """Make the place where locks of a selection are verified, while the block makes one.

        Gives what raises once there can be no such place.
        """

    def __call__(self, selection: Selection, lock: LockDirectory) -> VerifiedLock:
        """What a lock shows there."""


def verify_lock(directory: LockDirectory, inputs: LockInputs, verifier: LockVerifier | None) -> VerifiedLock | None:
    """What a lock shows, with the findings that the request lets pass; None without a verification.

    Raises:
        LockRefusedError: other findings.
    """
    if verifier is None:
        return None
    verified = verifier(inputs.selection, directory)
    return replace(verified, findings=refuse(verified.findings, inputs.request.allow, inputs.title))


def note_verified(directory: LockDirectory, verified: VerifiedLock | None) -> None:
    """Write what verification showed into the record of a lock, where it does not have it."""
    if verified is None:
        return
    lock = directory.lock
    more = [line for line in (finding.line() for finding in verified.findings) if line not in lock.allowed]
    noted = lock.model_copy(
        update={
            "allowed": (*lock.allowed, *more),
            "verified_in": verified.where,
            "stubbed": verified.stubbed,
            "base_image": verified.base_image,
            "base_made_at": verified.base_made_at,
        }
    )
    if noted != lock:
        write_atomic(directory.path / lockfile.RECORD_FILE, lockfile.render(lockfile.sealed(noted)).encode())
