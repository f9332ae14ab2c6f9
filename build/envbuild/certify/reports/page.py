"""One page of HTML that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import jinja2

from envbuild.certify.certificates.statement import CERTIFICATE_FILE, Bandwidth, CaseVerdict, Problem
from envbuild.certify.certificates.telling import count, machine_facts
from envbuild.certify.reports.charts import Chart, Point, Series, bytes_text, draw
from envbuild.certify.reports.report import JUNIT_FILE, Report, environment_of

NUMBERS = (("loss", "loss"), ("grad_norm", "grad norm"), ("weights", "weights"))
# A case's ID is made from its fields; the precision is the word that no model is called by.
_ID = re.compile(r"(?P<model>.+?)-(?P<precision>fp32|bf16|fp8)-(?P<layout>.+)")
# Lines that stay apart, also for those who see no colours; later ones begin again.
STYLES = 6
PROBLEMS_SHOWN = 3


@dataclass(frozen=True)
class Compared:
    """One number of a case against its baseline's."""

    name: str
    found: str
    allowed: str
    share: float
    over: bool


@dataclass(frozen=True)
class StepRow:
    """A step of a case beside its baseline's."""

    step: int
    cells: tuple[str, ...]


@dataclass(frozen=True)
class CaseView:
    """A case, ready to be shown."""

    anchor: str
    verdict: CaseVerdict
    label: str
    status: str
    compared: tuple[Compared, ...]
    charts: tuple[Chart, ...]
    columns: tuple[str, ...]
    rows: tuple[StepRow, ...]
    logs: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """The cases of one model and precision, which share a baseline."""

    title: str
    cases: tuple[CaseView, ...]
    charts: tuple[Chart, ...]
    identical: bool


@dataclass(frozen=True)
class Grid:
    """Models by layouts, to be seen at once: a cell is the cases of both, more than one where they were repeated."""

    layouts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[CaseView, ...], ...]], ...]


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
    views = [_case(case, report) for case in report.cases]
    reused = sum(case.reused is not None for case in report.cases)
    return template.render(
        report=report,
        style=style,
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        headline=_headline(report),
        failed=len(report.failed_cases),
        reused=reused,
        count=count(report.cases).partition(",")[0],
        groups=_groups(views),
        grid=_grid(views),
        problems=_problems(report, views),
        facts=machine_facts(report.measured) if report.measured else [],
        machine=report.measured.machine if report.measured else None,
        environment=[(name, value) for name, value in _environment(report)],
        packages=sorted((name, str(version)) for name, version in environment_of(report, "versions").items()),
        bandwidth=_bandwidth(report.measured.bandwidth if report.measured else None),
        speeds=report.measured.bandwidth.points if report.measured and report.measured.bandwidth else (),
        certificate_file=CERTIFICATE_FILE,
        junit_file=JUNIT_FILE,
        bytes_text=bytes_text,
    )


@cache
def _template() -> tuple[jinja2.Template, str]:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("envbuild.certify.reports", "."),
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


def _parts(case_id: str) -> tuple[str, str]:
    """What a group of cases is called, and the case in it."""
    found = _ID.fullmatch(case_id)
    return (f"{found['model']}, {found['precision']}", found["layout"]) if found else (case_id, case_id)


def _groups(views: Sequence[CaseView]) -> list[Group]:
    groups: dict[str, list[CaseView]] = {}
    for view in views:
        groups.setdefault(_parts(view.verdict.id)[0], []).append(view)
    return [Group(title, tuple(found), _overview(found), _identical(found)) for title, found in groups.items()]


def _grid(views: Sequence[CaseView]) -> Grid | None:
    """The grid of models and layouts; None where one row says it all."""
    cells: dict[str, dict[str, list[CaseView]]] = {}
    layouts: dict[str, None] = {}
    for view in views:
        title, layout = _parts(view.verdict.id)
        layouts[layout] = None
        cells.setdefault(title, {}).setdefault(layout, []).append(view)
    if len(cells) < 2:
        return None
    rows = [(title, tuple(tuple(found.get(layout, ())) for layout in layouts)) for title, found in cells.items()]
    return Grid(tuple(layouts), tuple(rows))


def _identical(views: Sequence[CaseView]) -> bool:
    """Whether every case has its baseline's numbers, digit for digit."""
    compared = [view.verdict for view in views if view.verdict.baseline is not None]
    found = [case.largest_relative_difference for case in compared]
    return bool(found) and all((item.loss, item.grad_norm) == (0, 0) for item in found)


def _case(case: CaseVerdict, report: Report) -> CaseView:
    baseline = _baseline(case, report.cases)
    repeated = any(other.id == case.id and other.repeat != case.repeat for other in report.cases)
    status = "failed" if not case.passed else "reused" if case.reused else "passed"
    columns, rows = _steps(case, baseline)
    return CaseView(
        anchor=f"case-{case.id}-{case.repeat}",
        verdict=case,
        label=_parts(case.id)[1] + (f", repeat {case.repeat}" if repeated else ""),
        status=status,
        compared=tuple(_compared(case)),
        charts=_own_charts(case, baseline),
        columns=columns,
        rows=rows,
        logs=report.logs.get(case.id, ()),
    )


def _baseline(case: CaseVerdict, cases: Iterable[CaseVerdict]) -> CaseVerdict | None:
    """The baseline of the same repeat, or the first of its name."""
    found = [other for other in cases if other.id == case.baseline]
    return next((other for other in found if other.repeat == case.repeat), found[0] if found else None)


def _compared(case: CaseVerdict) -> Iterable[Compared]:
    for key, name in NUMBERS:
        found, allowed = getattr(case.largest_relative_difference, key), getattr(case.tolerance, key)
        if found is None or case.baseline is None:
            continue
        share = 0.0 if not allowed else min(1.0, found / allowed)
        yield Compared(
            name=name,
            found="identical" if found == 0 else f"{found:.1e}",
            allowed="" if allowed is None else f"{allowed:g}",
            share=round(100 * share, 1),
            over=allowed is not None and found > allowed,
        )


def _relative(found: float | None, expected: float | None) -> float | None:
    if found is None or expected is None:
        return None
    if found == expected:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else None


def _steps(case: CaseVerdict, baseline: CaseVerdict | None) -> tuple[tuple[str, ...], tuple[StepRow, ...]]:
    if baseline is None:
        rows = [StepRow(step.step, (_number(step.loss), _number(step.grad_norm))) for step in case.steps]
        return ("step", "loss", "grad norm"), tuple(rows)
    reference = {step.step: step for step in baseline.steps}
    rows = []
    for step in case.steps:
        other = reference.get(step.step)
        cells: list[str] = []
        expected = (other.loss, other.grad_norm) if other else (None, None)
        for mine, its in zip((step.loss, step.grad_norm), expected, strict=True):
            cells += [_number(mine), _number(its) if other else "no step", _difference(_relative(mine, its))]
        rows.append(StepRow(step.step, tuple(cells)))
    return ("step", "loss", "baseline", "off by", "grad norm", "baseline", "off by"), tuple(rows)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.7g}"


def _difference(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _points(case: CaseVerdict, key: str) -> list[Point]:
    return [(float(step.step), getattr(step, key)) for step in case.steps]


def _own_charts(case: CaseVerdict, baseline: CaseVerdict | None) -> tuple[Chart, ...]:
    """A case's numbers over its baseline's."""
    charts = []
    for key, name in NUMBERS[:2]:
        style = "line-failed" if not case.passed else "line-0"
        series = [Series(case.id, _points(case, key), style)]
        if baseline is not None:
            series.insert(0, Series("baseline", _points(baseline, key), "line-baseline"))
        described = f"{name} of every step of {case.id}" + (" and of its baseline" if baseline else "")
        charts.append(draw(name, series, x_label="step", describes=described))
    return tuple(chart for chart in charts if chart)


def _overview(views: Sequence[CaseView]) -> tuple[Chart, ...]:
    """All cases of a group over their baseline, and how far each is off."""
    cases = [view.verdict for view in views]
    baseline = next((case for case in cases if case.baseline is None), None)
    others = [view for view in views if view.verdict.baseline is not None]
    styles = {id(view): _style(view, index) for index, view in enumerate(others)}
    charts = []
    for key, name in NUMBERS[:2]:
        series = [Series("baseline", _points(baseline, key), "line-baseline")] if baseline else []
        series += [Series(view.label, _points(view.verdict, key), styles[id(view)]) for view in others]
        charts.append(draw(name, series, x_label="step", describes=f"{name} of every step of every case"))
    if baseline is not None and others:
        for key, name in NUMBERS[:2]:
            allowed = [getattr(view.verdict.tolerance, key) for view in others]
            limits = [value for value in allowed if value]
            charts.append(
                draw(
                    f"{name}: off by, relative",
                    [_off_series(view, cases, key, styles[id(view)]) for view in others],
                    x_label="step",
                    log_y=True,
                    limit=(max(limits), f"allowed {max(limits):g}") if limits else None,
                    describes=f"how far the {name} of every step is from the baseline's",
                )
            )
    return tuple(chart for chart in charts if chart)


def _style(view: CaseView, index: int) -> str:
    return "line-failed" if view.status == "failed" else f"line-{index % STYLES}"


def _off_series(view: CaseView, cases: Iterable[CaseVerdict], key: str, style: str) -> Series:
    points = _off(view.verdict, cases, key)
    same = bool(points) and all(y == 0 for _, y in points)
    return Series(f"{view.label} (identical)" if same else view.label, points, style)


def _off(case: CaseVerdict, cases: Iterable[CaseVerdict], key: str) -> list[Point]:
    baseline = _baseline(case, cases)
    reference = {step.step: getattr(step, key) for step in baseline.steps} if baseline else {}
    return [(float(step.step), _relative(getattr(step, key), reference.get(step.step))) for step in case.steps]


def _bandwidth(found: Bandwidth | None) -> Chart | None:
    if found is None:
        return None
    floor = found.floor_gigabytes_per_second
    return draw(
        "all_reduce, bus bandwidth in GB/s",
        [Series("measured", [(float(p.bytes), p.bus_gigabytes_per_second) for p in found.points], "line-0")],
        x_label="message size",
        log_x=True,
        from_zero=True,
        limit=(floor, f"at least {floor:g}") if floor else None,
        x_text=bytes_text,
        describes=f"bandwidth by message size, {found.ranks} ranks, {found.backend}",
    )


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
