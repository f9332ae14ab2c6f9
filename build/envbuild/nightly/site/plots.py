"""The curves of the site: what changes from night to night, and the losses of one night."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from typing import TypeVar

from envbuild.catalog.fields import moment_of
from envbuild.certify.report.charts import Chart, Point, Scales, Series, ShadedBand, draw
from envbuild.ledger.ledger import grouped
from envbuild.ledger.models import CaseRow, Row
from envbuild.nightly.site.snapshot import LedgerSnapshot

# So many lines have a style each, also for those who see no colours.
LINES = 4
R = TypeVar("R", bound=Row)
_EPOCH = date(1970, 1, 1)
SECONDS_OF_DAY = 86_400


def history(stack: str, targets: Sequence[str], snapshot: LedgerSnapshot) -> tuple[Chart, ...]:
    """Charts of a stack over time; what was never measured has none."""
    cases = [row for row in snapshot.cases if row.stack == stack and row.step_seconds and row.passed]
    # The case that most runs have: others come and go with the matrix.
    counted = Counter(row.case for row in cases if row.baseline is None)
    case = min(counted, key=lambda name: (-counted[name], name), default="")
    images = [row for row in snapshot.images if row.stack == stack]
    certificates = [row for row in snapshot.certificates if row.stack == stack and row.seconds]
    charts = [
        *_by_target(
            f"step time of {case}, ms",
            [row for row in cases if row.case == case],
            lambda row: 1000 * (row.step_seconds or 0),
            targets,
        ),
        *_by_target("image size, GB", images, lambda row: row.size_bytes / 1e9, targets),
        *_by_target("certification, minutes", certificates, lambda row: (row.seconds or 0) / 60, targets),
    ]
    return tuple(chart for chart in charts if chart)


def _by_target(
    title: str, rows: Sequence[R], value: Callable[[R], float], targets: Sequence[str]
) -> list[Chart | None]:
    """Charts of four targets at most: more lines cannot be told apart."""
    by_target = grouped(rows, lambda row: row.of_target)
    known = [target for target in targets if target in by_target]
    charts = []
    # Evenly: five are three and two, and not four and one.
    size = math.ceil(len(known) / math.ceil(len(known) / LINES)) if known else 1
    for start in range(0, len(known), size):
        names = known[start : start + size]
        lines = [
            Series(name, [(_day(row), value(row)) for row in by_target[name]], f"line-{index}")
            for index, name in enumerate(names)
        ]
        charts.append(_over_time(f"{title}, {names[0]}" if len(names) == 1 else title, lines))
    return charts


def _over_time(title: str, lines: Sequence[Series]) -> Chart | None:
    ends = ((line.name, line.points[-1][1]) for line in lines)
    last = "; ".join(f"{name} {number:.4g} at last" for name, number in ends if number is not None)
    scales = Scales(x_label="", from_zero=True, x_text=_date)
    return draw(title, lines, scales, describes=f"{title}, by day: {last}")


def _day(row: Row) -> float:
    """Days since 1970, with their fraction."""
    return moment_of(row.moment).timestamp() / SECONDS_OF_DAY


def _date(day: float) -> str:
    return f"{_EPOCH + timedelta(days=int(day)):%b %d}"


def losses(cases: Sequence[CaseRow]) -> tuple[Chart, ...]:
    """The losses of a run: for each baseline its own, and those of the cases that are compared with it."""
    charts = []
    by_baseline = grouped(cases, lambda row: row.baseline or row.case)
    for baseline, rows in by_baseline.items():
        own = next((row for row in rows if row.case == baseline), None)
        others = [row for row in rows if row.case != baseline and row.passed]
        failed = [row for row in rows if not row.passed]
        series: list[Series | ShadedBand] = []
        if own is not None:
            series.append(Series("baseline", _steps(own), "line-baseline"))
        if len(others) == 1:
            series.append(Series(others[0].case, _steps(others[0]), "line-0"))
        elif others:
            series.append(ShadedBand(f"{len(others)} cases", _edges(others)))
        for index, row in enumerate(failed[:LINES]):
            series.append(Series(f"{row.case}: failed", _steps(row), f"line-failed-{index}"))
        names = "; ".join(line.name for line in series)
        charts.append(draw(f"loss of {baseline}", series, describes=f"loss of every step: {names}"))
    return tuple(chart for chart in charts if chart)


def _steps(row: CaseRow) -> list[Point]:
    return [(float(number), loss) for number, loss in enumerate(row.loss, start=1)]


def _edges(rows: Sequence[CaseRow]) -> list[tuple[float, float | None, float | None]]:
    listed = []
    for number in range(max(len(row.loss) for row in rows)):
        values = [loss for row in rows if number < len(row.loss) and (loss := row.loss[number]) is not None]
        listed.append((float(number + 1), min(values, default=None), max(values, default=None)))
    return listed
