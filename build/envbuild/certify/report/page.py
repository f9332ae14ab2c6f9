"""One page of HTML that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.certify.cases.coverage import AXES, PARTS, lines_of
from envbuild.certify.certificate.statement import CERTIFICATE_FILE
from envbuild.certify.models import Problem
from envbuild.certify.report.charts import bytes_text
from envbuild.certify.report.curves import bandwidth_chart
from envbuild.certify.report.describe import count, describe_fields, machine_facts, node_rows
from envbuild.certify.report.model import Report, environment_of
from envbuild.certify.report.network import network_rows
from envbuild.certify.report.views import CaseView, groups_of
from envbuild_smoke.plan.models import COLLECTIVES

if TYPE_CHECKING:
    import jinja2

JUNIT_FILE = "junit.xml"
PROBLEMS_SHOWN = 3


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a case, or with the run as a whole (which has no anchor): some of it, and how much more."""

    title: str
    anchor: str
    items: tuple[Problem, ...]
    more: int


def page_html(report: Report) -> str:
    template, style = _template()
    # The page shows text that the environment under test wrote. Should escaping ever fail, the policy still lets
    # nothing run or load; its own style is allowed by its hash (CSP Level 3, section 2.3.1).
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    groups, rows_of_nodes = groups_of(report), node_rows(report.measured)
    return template.render(
        report=report,
        style=style,
        # default-src says nothing of base-uri and form-action (CSP Level 3, section 6.1).
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        headline=_headline(report),
        failed=len(report.failed_cases),
        count=count(report.cases),
        groups=groups,
        problems=_problems(report, [view for group in groups for view in group.cases]),
        facts=machine_facts(report.measured),
        machine=report.measured.machine,
        environment=list(_environment(report)),
        packages=sorted((name, str(version)) for name, version in environment_of(report, "versions").items()),
        axes=AXES,
        columns=[axis for axis in AXES if axis not in PARTS],
        grid={key: pair for pair in report.pairs for key in (pair.axes, pair.axes[::-1])},
        pair_lines=lines_of(report.pairs),
        field_lines=describe_fields(report.fields),
        bandwidth=bandwidth_chart(report.measured.bandwidth),
        speeds=report.measured.bandwidth.points if report.measured.bandwidth else (),
        network=network_rows(report.measured.network, report.hosts or {row.node: row.host for row in rows_of_nodes}),
        nodes=rows_of_nodes,
        collectives=COLLECTIVES,
        certificate_file=CERTIFICATE_FILE,
        junit_file=JUNIT_FILE,
        bytes_text=bytes_text,
    )


@cache
def _template() -> tuple[jinja2.Template, str]:
    template = html_templates("envbuild.certify.report").get_template("page.html.j2")
    return template, (Path(__file__).parent / "page.css").read_text()


def html_templates(*packages: str) -> jinja2.Environment:
    """The templates of some packages: values are escaped, and one that is missing is an error."""
    import jinja2  # 0.1 s that a certificate which stands already does not need

    return jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package, ".") for package in packages]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _headline(report: Report) -> str:
    compared = [case for case in report.cases if case.baseline is not None]
    if report.passed:
        words = "every case computes" if len(compared) != 1 else "the case computes"
        return f"{words} the same training as one process".capitalize()
    return report.what


def _environment(report: Report) -> Iterable[tuple[str, str]]:
    for name in ("python", "platform", "device"):
        if value := report.measured.environment.get(name):
            yield name, str(value)
    redirects = report.measured.environment.get("cuda_redirects")
    if isinstance(redirects, list) and redirects:
        yield "redirected to the CPU", ", ".join(map(str, redirects))


def _problems(report: Report, views: Sequence[CaseView]) -> list[Trouble]:
    """What is wrong, the run as a whole first."""
    troubles = [Trouble("The run as a whole", "", report.problems, 0)] if report.problems else []
    for view in views:
        problems = view.verdict.problems
        if not view.verdict.passed:
            more = max(0, len(problems) - PROBLEMS_SHOWN)
            troubles.append(Trouble(view.verdict.id, view.anchor, problems[:PROBLEMS_SHOWN], more))
    return troubles
