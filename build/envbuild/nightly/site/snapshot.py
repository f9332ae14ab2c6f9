"""What the pages show of the ledger, read once, and found by what it belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from envbuild.ledger.ledger import Ledger
from envbuild.ledger.models import (
    BisectRow,
    CaseRow,
    CertificateRow,
    ImageRow,
    LockRow,
    NightRow,
    PublicationRow,
    Row,
    StepRow,
)

R = TypeVar("R", bound=Row)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class LedgerSnapshot:
    """Rows of a ledger, each kind oldest first."""

    locks: tuple[LockRow, ...]
    images: tuple[ImageRow, ...]
    cases: tuple[CaseRow, ...]
    certificates: tuple[CertificateRow, ...]
    publications: tuple[PublicationRow, ...]
    nights: tuple[NightRow, ...]
    steps: tuple[StepRow, ...]
    bisects: tuple[BisectRow, ...]

    @classmethod
    def of(cls, ledger: Ledger) -> LedgerSnapshot:
        return cls(
            locks=ledger.rows(LockRow),
            images=ledger.rows(ImageRow),
            cases=ledger.rows(CaseRow),
            certificates=ledger.rows(CertificateRow),
            publications=ledger.rows(PublicationRow),
            nights=ledger.rows(NightRow),
            steps=ledger.rows(StepRow),
            bisects=ledger.rows(BisectRow),
        )

    @cached_property
    def steps_of_night(self) -> dict[str, list[StepRow]]:
        return grouped(self.steps, lambda step: step.night)

    @cached_property
    def cases_of_run(self) -> dict[tuple[str, str], list[CaseRow]]:
        """By run (a certificate's digest, or a night that failed) and target."""
        return grouped(self.cases, lambda case: (case.run, case.target))

    @cached_property
    def bisects_of_night(self) -> dict[str, list[BisectRow]]:
        return grouped(self.bisects, lambda row: row.night)

    @cached_property
    def locks_by_digest(self) -> dict[str, list[LockRow]]:
        return grouped(self.locks, lambda lock: lock.digest)

    @cached_property
    def images_of_lock(self) -> dict[str, list[ImageRow]]:
        return grouped(self.images, lambda row: row.lock_digest)

    @cached_property
    def certificates_of_lock(self) -> dict[str, list[CertificateRow]]:
        return grouped(self.certificates, lambda row: row.lock_digest)

    @cached_property
    def publications_of_lock(self) -> dict[str, list[PublicationRow]]:
        return grouped(self.publications, lambda row: row.lock_digest)


def grouped(rows: Iterable[R], key: Callable[[R], K]) -> dict[K, list[R]]:
    """Rows by a key, each group in their order."""
    found: defaultdict[K, list[R]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return dict(found)
