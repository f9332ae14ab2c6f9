"""The files of a report: ``junit.xml`` and ``report.html``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from envbuild.certify.report.junit import junit_xml
from envbuild.certify.report.model import Report
from envbuild.certify.report.page import JUNIT_FILE, page_html
from envbuild.core.files import open_plain, write_atomic

PAGE_FILE = "report.html"
LOG_END_LINES = 60


@dataclass(frozen=True)
class ReportFiles:
    junit: Path
    page: Path


def standing_reports(folder: Path, certificate: Path) -> ReportFiles | None:
    """The reports in a folder, where both were written after the certificate that they show; else None."""
    # A certificate that was issued again has newer numbers than its old reports.
    files = ReportFiles(folder / JUNIT_FILE, folder / PAGE_FILE)
    try:
        written = min(path.stat().st_mtime_ns for path in (files.junit, files.page))
        return files if written >= certificate.stat().st_mtime_ns else None
    except FileNotFoundError:
        return None


def write_reports(folder: Path, report: Report) -> ReportFiles:
    """Write ``junit.xml`` and ``report.html`` into a folder, in the place of older ones."""
    files = ReportFiles(folder / JUNIT_FILE, folder / PAGE_FILE)
    write_atomic(files.junit, junit_xml(report))
    write_atomic(files.page, page_html(report))
    return files


def end_of(log: Path) -> str:
    """The last lines of a log; nothing where there is no log."""
    try:
        # What was brought back may have a pipe in the place of a log, and nothing waits for one.
        with open_plain(log) as stream:
            # The log of a long run may have gigabytes.
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 64 * 1024))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LOG_END_LINES:])
