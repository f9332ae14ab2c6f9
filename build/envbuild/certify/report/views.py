"""Cases as the page shows them: a row of a table each, and everything about one below."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from envbuild.certify.models import CaseVerdict
from envbuild.certify.report.charts import Chart
from envbuild.certify.report.curves import CURVES, Against, overview, own_charts, relative
from envbuild.certify.report.describe import describe_reference, describe_spread
from envbuild.certify.report.model import Report

NUMBERS = (*CURVES, ("weights", "weights"), ("gradients", "gradients"))
# A case's ID is made from its fields; the precision is the word that no model is called by.
_ID = re.compile(r"(?P<model>.+?)-(?P<precision>fp32|bf16|fp16|fp8)-(?P<layout>.+)")


@dataclass(frozen=True)
class Compared:
    """One number of a case against its baseline's: how far off, and the band within which it passes."""

    name: str
    off: str
    band: str
    over: bool

    @property
    def text(self) -> str:
        """Both, as text."""
        return f"{self.off} (band {self.band})" if self.band else self.off


@dataclass(frozen=True)
class CaseView:
    """A case, ready to be shown."""

    anchor: str
    shown: Against
    compared: Mapping[str, Compared]
    charts: tuple[Chart, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    logs: tuple[str, ...]

    @property
    def verdict(self) -> CaseVerdict:
        return self.shown.case

    @property
    def spread(self) -> str:
        """What moved weights did to a baseline; empty for other cases."""
        return describe_spread(self.verdict.spread) if self.verdict.baseline is None else ""

    @property
    def reference(self) -> str:
        """How a baseline compares with the reference; empty for other cases."""
        return describe_reference(self.verdict.reference) if self.verdict.baseline is None else ""

    @property
    def status(self) -> str:
        return "passed" if self.verdict.passed else "failed"

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks that it did not pass, each once."""
        return tuple(dict.fromkeys(problem.check for problem in self.verdict.problems))


@dataclass(frozen=True)
class Column:
    """A number of a table, and the band that all its cases share; none where they have different ones."""

    key: str
    name: str
    band: str


@dataclass(frozen=True)
class CaseGroup:
    """The cases of one model and precision."""

    title: str
    summary: str
    cases: tuple[CaseView, ...]
    columns: tuple[Column, ...]
    charts: tuple[Chart, ...]
    identical: bool


def groups_of(report: Report) -> list[CaseGroup]:
    """The cases of a report by model and precision."""
    groups: dict[str, list[CaseView]] = {}
    for case in report.cases:
        groups.setdefault(_parts(case.id)[0], []).append(_case(case, report))
    return [
        CaseGroup(
            title=title,
            summary=_summary(group),
            cases=tuple(group),
            columns=tuple(_columns(group)),
            charts=overview([view.shown for view in group]),
            identical=_identical(group),
        )
        for title, group in groups.items()
    ]


def _parts(case_id: str) -> tuple[str, str]:
    """What a group of cases is called, and the case in it."""
    match = _ID.fullmatch(case_id)
    return (f"{match['model']}, {match['precision']}", match["layout"]) if match else (case_id, case_id)


def _summary(views: Sequence[CaseView]) -> str:
    failed = sum(not view.verdict.passed for view in views)
    if failed:
        return f"{failed} of {len(views)} failed"
    return "1 case, passed" if len(views) == 1 else f"{len(views)} cases, all passed"


def _columns(views: Sequence[CaseView]) -> Iterable[Column]:
    for key, name in NUMBERS:
        compared = [view.compared[key] for view in views if key in view.compared]
        bands = {value.band for value in compared}
        if compared:
            yield Column(key, name, bands.pop() if len(bands) == 1 else "")


def _identical(views: Sequence[CaseView]) -> bool:
    """Whether every case has its baseline's numbers, digit for digit."""
    compared = [view.verdict for view in views if view.verdict.baseline is not None]
    differences = [case.largest_relative_difference for case in compared]
    return bool(differences) and all((difference.loss, difference.grad_norm) == (0, 0) for difference in differences)


def _case(case: CaseVerdict, report: Report) -> CaseView:
    repeated = any(other.id == case.id and other.repeat != case.repeat for other in report.cases)
    label = _parts(case.id)[1] + (f", repeat {case.repeat}" if repeated else "")
    shown = Against(label, case, _baseline(case, report.cases))
    columns, rows = _steps(case, shown.baseline)
    return CaseView(
        anchor=f"case-{case.id}-{case.repeat}",
        shown=shown,
        compared=dict(_compared(case)),
        charts=own_charts(shown),
        columns=columns,
        rows=rows,
        logs=report.logs.get(case.id, ()),
    )


def _baseline(case: CaseVerdict, cases: Iterable[CaseVerdict]) -> CaseVerdict | None:
    """The baseline of the same repeat, or the first of its name."""
    matching = [other for other in cases if other.id == case.baseline]
    return next((other for other in matching if other.repeat == case.repeat), matching[0] if matching else None)


def _compared(case: CaseVerdict) -> Iterable[tuple[str, Compared]]:
    for key, name in NUMBERS:
        difference, allowed = getattr(case.largest_relative_difference, key), getattr(case.tolerance, key)
        if difference is None or case.baseline is None:
            continue
        yield (
            key,
            Compared(
                name=name,
                off="identical" if difference == 0 else f"{difference:.1e}",
                band="" if allowed is None else f"{allowed:.2g}",
                over=allowed is not None and difference > allowed,
            ),
        )


def _steps(case: CaseVerdict, baseline: CaseVerdict | None) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The columns and the rows of a case's steps, next to its baseline's."""
    if baseline is None:
        rows = [(str(step.step), _number(step.loss), _number(step.grad_norm)) for step in case.steps]
        return ("step", "loss", "grad norm"), tuple(rows)
    reference = {step.step: step for step in baseline.steps}
    compared: list[tuple[str, ...]] = []
    for step in case.steps:
        other = reference.get(step.step)
        cells = [str(step.step)]
        expected = (other.loss, other.grad_norm) if other else (None, None)
        for mine, its in zip((step.loss, step.grad_norm), expected, strict=True):
            cells += [_number(mine), _number(its) if other else "no step", _difference(relative(mine, its))]
        compared.append(tuple(cells))
    return ("step", "loss", "baseline", "off by", "grad norm", "baseline", "off by"), tuple(compared)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.7g}"


def _difference(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"
