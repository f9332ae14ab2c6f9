"""What reports are made from: a certification that ran, whether it passed or not."""

from __future__ import annotations

from pydantic import ConfigDict, Field, JsonValue

from envbuild.certify.cases.coverage import Pair
from envbuild.certify.certificate.statement import Certificate, CertifiedRun
from envbuild.certify.models import CaseVerdict, Problem
from envbuild_smoke.results import Finding


class Report(CertifiedRun):
    """A certification that ran.

    The same certification gives the same bytes of JUnit and HTML.
    """

    model_config = ConfigDict(populate_by_name=True)

    passed: bool
    name: str = Field(description="what the image or environment is called")
    what: str = Field(default="", description="why there is no certificate, in one line")
    digests: dict[str, str] = Field(description="of what it is about, by name")
    problems: tuple[Problem, ...] = Field(default=(), description="of the run as a whole")
    pairs: tuple[Pair, ...] = Field(default=(), description="of axes, and the cases that use both")
    findings: tuple[Finding, ...] = ()
    hosts: dict[int, str] = Field(default={}, description="names of the nodes, by number")
    drain: tuple[str, ...] = Field(default=(), description="commands that take bad nodes out of use, for people")
    issued_at: str | None = None
    keyid: str | None = Field(default=None, description="of the key that signed the certificate")
    logs: dict[str, tuple[str, ...]] = Field(default={}, description="paths of a case's logs, by its ID")
    log: str | None = Field(default=None, description="the whole run's log")
    log_end: str = ""

    @property
    def failed_cases(self) -> tuple[CaseVerdict, ...]:
        return tuple(case for case in self.cases if not case.passed)


def report_of(certificate: Certificate, **details: object) -> Report:
    """The report of a certification that passed; ``details`` are the fields that its certificate does not have."""
    predicate = certificate.predicate
    shared = {name: getattr(predicate, name) for name in (*CertifiedRun.model_fields, "issued_at")}
    return Report.model_validate({**shared, "passed": True, "digests": certificate.digests(), **details})


def environment_of(report: Report, key: str) -> dict[str, JsonValue]:
    """An object of the environment that the runner reported; empty where it did not."""
    value = report.measured.environment.get(key)
    return value if isinstance(value, dict) else {}
