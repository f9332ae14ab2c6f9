"""What reports are made from: a certification that ran, whether it passed or not."""

from __future__ import annotations

from pydantic import ConfigDict, Field, JsonValue

from envbuild.catalog.fields import TomlModel
from envbuild.certify.cases.coverage import Pair
from envbuild.certify.certificate.statement import Certificate, Measured
from envbuild.certify.models import CaseVerdict, EnvironmentFinding, NotVouched, Problem
from envbuild.launch.executors import Form
from envbuild.launch.launchers import Placement


class Report(TomlModel):
    """A certification that ran.

    The same certification gives the same bytes of JUnit and HTML.
    """

    model_config = ConfigDict(populate_by_name=True)

    passed: bool
    name: str = Field(description="what the image or environment is called")
    what: str = Field(default="", description="why there is no certificate, in one line")
    stack: str
    base: str
    target: str
    form: Form = Field(description="of the image in which the cases ran")
    launcher: str = Field(description="what ran them")
    runtime: str | None = None
    digests: dict[str, str] = Field(description="of what it is about, by name")
    lock_digest: str
    matrix: str
    matrix_is_shipped: bool
    whole_matrix: bool
    cases: tuple[CaseVerdict, ...] = ()
    not_vouched: tuple[NotVouched, ...] = ()
    problems: tuple[Problem, ...] = Field(default=(), description="of the run as a whole")
    pairs: tuple[Pair, ...] = Field(default=(), description="of axes, and the cases that use both")
    findings: tuple[EnvironmentFinding, ...] = ()
    measured: Measured
    plan_digest: str
    nonce: str
    envbuild: str
    judge: int
    issued_at: str | None = None
    keyid: str | None = Field(default=None, description="of the key that signed the certificate")
    logs: dict[str, tuple[str, ...]] = Field(default={}, description="paths of a case's logs, by its ID")
    log: str | None = Field(default=None, description="the whole run's log")
    log_end: str = ""

    @property
    def place(self) -> Placement:
        """Where the cases ran."""
        return Placement(form=self.form, launcher=self.launcher)

    @property
    def failed_cases(self) -> tuple[CaseVerdict, ...]:
        return tuple(case for case in self.cases if not case.passed)


def report_of(certificate: Certificate, **details: object) -> Report:
    """The report of a certification that passed; ``details`` are the fields that its certificate does not have."""
    predicate = certificate.predicate
    shared = {
        field: getattr(predicate, field) for field in type(predicate).model_fields if field in Report.model_fields
    }
    return Report.model_validate({**shared, "passed": True, "digests": certificate.digests(), **details})


def environment_of(report: Report, key: str) -> dict[str, JsonValue]:
    """An object of the environment that the runner reported; empty where it did not."""
    found = report.measured.environment.get(key)
    return found if isinstance(found, dict) else {}
