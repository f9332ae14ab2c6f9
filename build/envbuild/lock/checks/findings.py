"""What checks find, and the refusal: a finding refuses the lock unless ``--allow`` lets it pass, by code or by ID."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from envbuild.core.digests import digest_of, short
from envbuild.core.errors import CheckRefusedError

# Of the base, of what a machine did, or of packages that no finding of them names all of: with another package in the
# lock, or on another base, there may be none.
OPEN_CODES = frozenset(
    [
        "base-provides",
        "cuda-mixed",
        "driver",
        "forks",
        "glibc",
        "import",
        "install",
        "sm-floor",
        "uv-settings",
        "variable-folder",
    ]
)

# All codes but those of envs/conflicts, which are the names of its files.
CODES = OPEN_CODES | {
    "api-drift",
    "driver-collection",
    "nightly",
    "one-version",
    "override-range",
    "placeholder",
    "yanked",
}

# Findings that a refusal lists under --allow by ID; of more, it names the checks.
MOST_IDS = 4


@dataclass(frozen=True, kw_only=True)
class CheckFinding:
    """Something that a check refuses or warns of: its code, what is wrong, and what to do.

    Attributes:
        warning: it is recorded, and refuses nothing.
        subject: what its ID is made from, the same where only versions and lines differ; by default the packages.
        packages: the packages that it is about, by canonical name: another version of one of them may cure it.
        missing_module: a module that nothing in the lock brings, and something imports.
    """

    code: str
    what: str
    fix: str
    packages: tuple[str, ...] = ()
    missing_module: str = ""
    warning: bool = False
    subject: str = ""

    @property
    def id(self) -> str:
        """``CODE:DIGEST``, the same for the same finding in another lock."""
        subject = self.subject or " ".join(sorted(self.packages))
        return f"{self.code}:{short(digest_of({'code': self.code, 'subject': subject}))[:8]}"

    @property
    def is_closed(self) -> bool:
        """Whether only other versions of its packages cure it."""
        return self.code not in OPEN_CODES and bool(self.packages)

    def line(self) -> str:
        """The line of the record."""
        return f"{self.id}: {self.what}"


class LockRefusedError(CheckRefusedError):
    """Checks refused a lock: with their findings, none of which is a warning."""

    def __init__(self, what: str, *, why: str = "", fix: str = "", findings: Iterable[CheckFinding] = ()) -> None:
        self.findings = tuple(findings)
        super().__init__(what, why=why, fix=fix, codes=[finding.code for finding in self.findings])


def refuse(findings: Iterable[CheckFinding], allowed: Iterable[str], title: str) -> tuple[CheckFinding, ...]:
    """Those findings that were let pass, without warnings.

    Args:
        allowed: codes of checks, and IDs of findings.

    Raises:
        CheckRefusedError: there are others.
    """
    allow = set(allowed)
    counted = [finding for finding in findings if not finding.warning]
    passed = tuple(finding for finding in counted if allow & {finding.code, finding.id})
    refused = [finding for finding in counted if not allow & {finding.code, finding.id}]
    if refused:
        ids = list(dict.fromkeys(finding.id for finding in refused))
        codes = sorted({finding.code for finding in refused})
        words = " ".join(f"--allow {word}" for word in (ids if len(ids) <= MOST_IDS else codes))
        raise LockRefusedError(
            f"the lock of {title} is refused by {len(refused)} finding{'s' if len(refused) > 1 else ''}",
            why="\n".join(f"[{finding.id}] {finding.what}\n  {finding.fix}" for finding in refused),
            fix=f"Correct the stack. To accept what was found, noted in the record: {words}",
            findings=refused,
        )
    return passed
