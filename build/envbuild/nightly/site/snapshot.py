"""The rows of the ledger that pages show, read once and grouped."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.ledger.ledger import Ledger, grouped
from envbuild.ledger.models import (
    BisectRow,
    CaseRow,
    CertificateRow,
    ImageRow,
    LockRow,
    NightRow,
    PublicationRow,
    StepRow,
)


@dataclass(frozen=True, kw_only=True)
class LedgerSnapshot:
    """Rows of a ledger, each kind and each group oldest first.

    Attributes:
        cases_of_run: by run (a certificate's digest, or a night that failed) and target.
    """

    images: tuple[ImageRow, ...]
    cases: tuple[CaseRow, ...]
    certificates: tuple[CertificateRow, ...]
    nights: tuple[NightRow, ...]
    steps_of_night: dict[str, list[StepRow]]
    cases_of_run: dict[tuple[str, str], list[CaseRow]]
    bisects_of_night: dict[str, list[BisectRow]]
    locks_by_digest: dict[str, list[LockRow]]
    images_of_lock: dict[str, list[ImageRow]]
    certificates_of_lock: dict[str, list[CertificateRow]]
    publications_of_lock: dict[str, list[PublicationRow]]

    @classmethod
    def read(cls, ledger: Ledger) -> LedgerSnapshot:
        images, cases, certificates = ledger.rows(ImageRow), ledger.rows(CaseRow), ledger.rows(CertificateRow)
        return cls(
            images=images,
            cases=cases,
            certificates=certificates,
            nights=ledger.rows(NightRow),
            steps_of_night=grouped(ledger.rows(StepRow), lambda step: step.night),
            cases_of_run=grouped(cases, lambda case: (case.run, case.target)),
            bisects_of_night=grouped(ledger.rows(BisectRow), lambda row: row.night),
            locks_by_digest=grouped(ledger.rows(LockRow), lambda lock: lock.digest),
            images_of_lock=grouped(images, lambda row: row.lock_digest),
            certificates_of_lock=grouped(certificates, lambda row: row.lock_digest),
            publications_of_lock=grouped(ledger.rows(PublicationRow), lambda row: row.lock_digest),
        )
