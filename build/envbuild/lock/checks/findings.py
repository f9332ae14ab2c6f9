"""What checks find, and the refusal: a finding refuses the lock unless ``--allow CODE`` lets it pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from envbuild.core.errors import CheckRefusedError

# All codes but those of envs/conflicts, which are the names of its files.
CODES = frozenset(
    [
        "api-drift",
        "base-provides",
        "cuda-mixed",
        "driver",
        "driver-collection",
        "forks",
        "glibc",
        "import",
        "install",
        "one-version",
        "override-range",
        "placeholder",
        "sm-floor",
        "uv-settings",
        "variable-folder",
        "yanked",
    ]
)


@dataclass(frozen=True, kw_only=True)
class CheckFinding:
    """Something that a check refuses or warns of: its code, what is wrong, and what to do.

    Attributes:
        warning: it is recorded, and refuses nothing.
        packages: the packages that it is about, by canonical name: another version of one of them may cure it.
        missing_module: a module that nothing in the lock brings, and something imports.
    """

    code: str
    what: str
    fix: str
    packages: tuple[str, ...] = ()
    missing_module: str = ""
    warning: bool = False


class LockRefusedError(CheckRefusedError):
    """Checks refused a lock: with their findings."""

    def __init__(self, what: str, *, why: str = "", fix: str = "", findings: Iterable[CheckFinding] = ()) -> None:
        self.findings = tuple(findings)
        super().__init__(what, why=why, fix=fix, codes=[finding.code for finding in self.findings])


def refuse(findings: Iterable[CheckFinding], allowed: Iterable[str], title: str) -> tuple[CheckFinding, ...]:
    """Those findings that were let pass, without warnings.

    Raises:
        CheckRefusedError: there are others.
    """
    allow = set(allowed)
    counted = [finding for finding in findings if not finding.warning]
    passed = tuple(finding for finding in counted if finding.code in allow)
    refused = [finding for finding in counted if finding.code not in allow]
    if refused:
        raise LockRefusedError(
            f"the lock of {title} is refused by {len(refused)} finding{'s' if len(refused) > 1 else ''}",
            why="\n".join(f"[{finding.code}] {finding.what}\n  {finding.fix}" for finding in refused),
            fix="Correct the stack. To take it nevertheless, noted in the record: "
            + " ".join(f"--allow {code}" for code in sorted({finding.code for finding in refused})),
            findings=refused,
        )
    return passed
