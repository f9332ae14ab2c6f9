"""One page of HTML that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import jinja2

from envbuild.certify.certificate.describe import count, machine_facts
from envbuild.certify.certificate.statement import CERTIFICATE_FILE, Problem
from envbuild.certify.report.charts import bytes_text
from envbuild.certify.report.curves import bandwidth_chart
from envbuild.certify.report.report import JUNIT_FILE, Report, environment_of
from envbuild.certify.report.views import CaseView, groups_of

PROBLEMS_SHOWN = 3


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a case, or with the run as a whole (which has no anchor): some of it, and how much more."""

    title: str
    anchor: str
    items: tuple[Problem, ...]
    more: int


def page_html(report: Report) -> str:
    """The page of a report."""
    template, style = _template()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    groups = groups_of(report)
    reused = sum(case.reused is not None for case in report.cases)
    return template.render(
        report=report,
        style=style,
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        headline=_headline(report),
        failed=len(report.failed_cases),
        reused=reused,
        count=count(report.cases).partition(",")[0],
        groups=groups,
        problems=_problems(report, [view for group in groups for view in group.cases]),
        facts=machine_facts(report.measured) if report.measured else [],
        machine=report.measured.machine if report.measured else None,
        environment=[(name, value) for name, value in _environment(report)],
        packages=sorted((name, str(version)) for name, version in environment_of(report, "versions").items()),
        bandwidth=bandwidth_chart(report.measured.bandwidth if report.measured else None),
        speeds=report.measured.bandwidth.points if report.measured and report.measured.bandwidth else (),
        certificate_file=CERTIFICATE_FILE,
        junit_file=JUNIT_FILE,
        bytes_text=bytes_text,
    )


@cache
def _template() -> tuple[jinja2.Template, str]:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("envbuild.certify.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    source, _, _ = environment.loader.get_source(environment, "page.css") if environment.loader else ("", None, None)
    return environment.get_template("page.html.j2"), source


def _headline(report: Report) -> str:
    compared = [case for case in report.cases if case.baseline is not None]
    if report.passed:
        words = "every case computes" if len(compared) != 1 else "the case computes"
        return f"{words} the same training as one process".capitalize()
    return report.what or "There is no certificate"


def _environment(report: Report) -> Iterable[tuple[str, str]]:
    if report.measured is None:
        return
    for name in ("python", "platform", "device"):
        if value := report.measured.environment.get(name):
            yield name, str(value)
    redirects = report.measured.environment.get("cuda_redirects")
    if isinstance(redirects, list) and redirects:
        yield "redirected to the CPU", ", ".join(map(str, redirects))


def _problems(report: Report, views: Sequence[CaseView]) -> list[Trouble]:
    """What is wrong, the run as a whole first."""
    found = [Trouble("The run as a whole", "", report.problems, 0)] if report.problems else []
    for view in views:
        problems = view.verdict.problems
        if not view.verdict.passed:
            more = max(0, len(problems) - PROBLEMS_SHOWN)
            found.append(Trouble(view.verdict.id, view.anchor, problems[:PROBLEMS_SHOWN], more))
    return found
