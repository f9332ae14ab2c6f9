"""What reports are made from: a certification that ran, whether it passed or not. The same one gives the same bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, JsonValue

from envbuild.catalog.fields import TomlModel
from envbuild.certify.certificate.statement import CaseVerdict, Certificate, Measured, Problem
from envbuild.core.files import open_plain, write_atomic

JUNIT_FILE, PAGE_FILE = "junit.xml", "report.html"
LOG_END_LINES = 60


class EnvironmentDifference(TomlModel):
    """What differs between the lock and the environment that ran."""

    code: str
    package: str | None
    expected: str | None
    found: str | None


class Report(TomlModel):
    """A certification that ran.

    A case's logs are named by its ID; log_end holds the last lines of what explains a failure.
    """

    passed: bool
    name: str = Field(description="what the image or environment is called")
    what: str = Field(default="", description="why there is no certificate, in one line")
    stack: str
    base: str
    target: str
    in_: str = Field(description="where the cases ran")
    runtime: str | None = None
    digests: dict[str, str] = Field(description="of what it is about, by name")
    lock_digest: str
    matrix: str
    matrix_is_shipped: bool
    whole_matrix: bool
    cases: tuple[CaseVerdict, ...] = ()
    problems: tuple[Problem, ...] = Field(default=(), description="of the run as a whole")
    findings: tuple[EnvironmentDifference, ...] = ()
    measured: Measured | None = Field(default=None, description="None where nothing was measured, or it cannot be read")
    plan_digest: str = ""
    nonce: str = ""
    envbuild: str
    judge: int
    issued_at: str | None = None
    keyid: str | None = Field(default=None, description="of the key that signed the certificate")
    logs: dict[str, tuple[str, ...]] = Field(default={}, description="paths of a case's logs, by its ID")
    log: str | None = Field(default=None, description="the whole run's log")
    log_end: str = ""

    @property
    def failed_cases(self) -> tuple[CaseVerdict, ...]:
        """Those that did not pass."""
        return tuple(case for case in self.cases if not case.passed)


@dataclass(frozen=True)
class ReportFiles:
    """Where the reports are."""

    junit: Path
    page: Path


def report_of(certificate: Certificate, *, name: str, keyid: str | None, logs: dict[str, tuple[str, ...]]) -> Report:
    """The report of a certification that passed."""
    predicate = certificate.predicate
    return Report(
        passed=True,
        name=name,
        stack=predicate.stack,
        base=predicate.base,
        target=predicate.target,
        in_=predicate.in_,
        runtime=predicate.runtime,
        digests=certificate.digests(),
        lock_digest=predicate.lock_digest,
        matrix=predicate.matrix,
        matrix_is_shipped=predicate.matrix_is_shipped,
        whole_matrix=predicate.whole_matrix,
        cases=predicate.cases,
        measured=predicate.measured,
        plan_digest=predicate.plan_digest,
        nonce=predicate.nonce,
        envbuild=predicate.envbuild,
        judge=predicate.judge,
        issued_at=predicate.issued_at,
        keyid=keyid,
        logs=logs,
    )


def standing_reports(folder: Path, certificate: Path) -> ReportFiles | None:
    """The reports in a folder, where both were written after the certificate that they tell of; else None."""
    files = ReportFiles(folder / JUNIT_FILE, folder / PAGE_FILE)
    try:
        written = min(path.stat().st_mtime_ns for path in (files.junit, files.page))
        return files if written >= certificate.stat().st_mtime_ns else None
    except FileNotFoundError:
        return None


def write_reports(folder: Path, report: Report) -> ReportFiles:
    """Write ``junit.xml`` and ``report.html`` into a folder, in the place of older ones."""
    from envbuild.certify.report.junit import junit_xml
    from envbuild.certify.report.page import page_html

    files = ReportFiles(folder / JUNIT_FILE, folder / PAGE_FILE)
    write_atomic(files.junit, junit_xml(report))
    write_atomic(files.page, page_html(report))
    return files


def end_of(log: Path, lines: int = LOG_END_LINES) -> str:
    """The last lines of a log; nothing where there is none."""
    try:
        with open_plain(log) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 64 * 1024))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def environment_of(report: Report, key: str) -> dict[str, JsonValue]:
    """An object of the environment that the runner told of; empty where it told nothing."""
    found = report.measured.environment.get(key) if report.measured else None
    return found if isinstance(found, dict) else {}
