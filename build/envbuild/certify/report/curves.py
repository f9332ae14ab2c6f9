"""The curves of a report: a case over its baseline, and all cases of a model at once.

Lines on top of each other cannot be distinguished: where there are many, the worst are lines with their names, and the
rest is a band from the least to the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from envbuild.certify.certificate.statement import MeasuredBandwidth
from envbuild.certify.judge.numbers import relative_difference
from envbuild.certify.models import CaseVerdict
from envbuild.certify.report.charts import Chart, Point, Scales, Series, ShadedBand, bytes_text, draw

CURVES = (("loss", "loss"), ("grad_norm", "grad norm"))
# So many lines have a style each, also for those who see no colours.
LINES = 4
# Of more than those, so many are named.
NAMED = 2


@dataclass(frozen=True)
class Against:
    """A case, what the page calls it, and the baseline that it is compared with, if that is there."""

    label: str
    case: CaseVerdict
    baseline: CaseVerdict | None


@dataclass(frozen=True)
class _Curve:
    """What one case adds to a chart: the points, and how far it is off at most."""

    shown: Against
    points: Sequence[Point]
    worst: float


def relative(actual: float | None, expected: float | None) -> float | None:
    """How far a number is from the one that is expected; None where that is unknown."""
    difference = relative_difference(expected, actual)
    return difference if math.isfinite(difference) else None


def own_charts(shown: Against) -> tuple[Chart, ...]:
    """A case's numbers over its baseline's."""
    charts = []
    case, baseline = shown.case, shown.baseline
    for key, name in CURVES:
        series = [Series(case.id, _points(case, key), "line-0" if case.passed else "line-failed")]
        if baseline is not None:
            series.insert(0, Series("baseline", _points(baseline, key), "line-baseline"))
        described = f"{name} of every step of {case.id}" + (" and of its baseline" if baseline else "")
        charts.append(draw(name, series, describes=described))
    return tuple(chart for chart in charts if chart)


def overview(group: Sequence[Against]) -> tuple[Chart, ...]:
    """All cases of a model: how far each is off, and for each baseline its numbers with those of its cases."""
    compared = [view for view in group if view.baseline is not None]
    charts = [_differences(compared, key, name) for key, name in CURVES]
    # Twice reversed: of the repeats of a baseline the first stands for all, in the order of the group.
    baselines = {view.case.id: view for view in reversed(group) if view.case.baseline is None}
    for one in reversed(baselines.values()):
        mine = [view for view in compared if view.case.baseline == one.case.id]
        of = f", {one.label}" if len(baselines) > 1 else ""
        charts += [_numbers(one, mine, key, name, of) for key, name in CURVES]
    return tuple(chart for chart in charts if chart)


def _points(case: CaseVerdict, key: str) -> list[Point]:
    return [(float(step.step), getattr(step, key)) for step in case.steps]


def _off(shown: Against, key: str) -> list[Point]:
    baseline = shown.baseline
    reference = {step.step: getattr(step, key) for step in baseline.steps} if baseline else {}
    return [(float(step.step), relative(getattr(step, key), reference.get(step.step))) for step in shown.case.steps]


def _curves(group: Iterable[Against], key: str) -> list[_Curve]:
    """How far each case is off, the failed first and then the worst; without those where it is unknown."""
    charts = []
    for view in group:
        points = _off(view, key)
        if known := [y for _, y in points if y is not None]:
            charts.append(_Curve(view, points, max(known)))
    return sorted(charts, key=lambda curve: (curve.shown.case.passed, -curve.worst))


def _differences(group: Sequence[Against], key: str, name: str) -> Chart | None:
    """How far the cases are off, by step, and what is allowed."""
    curves = _curves(group, key)
    if not curves:
        return None
    named = curves if len(curves) <= LINES else curves[:NAMED]
    rest = curves[len(named) :]
    others = f"the other {len(rest)} cases: {_at_most(max((curve.worst for curve in rest), default=0))}"
    band = [ShadedBand(others, _edges(curve.points for curve in rest))] if rest else []
    texts = [f"{curve.shown.label}: {_at_most(curve.worst)}{_gap(curve.points)}" for curve in named]
    limits = sorted({limit for view in group if (limit := getattr(view.case.tolerance, key))})
    allowed = f"{'widest ' if len(limits) > 1 else ''}band {limits[-1]:.2g}" if limits else ""
    count = "1 case" if len(curves) == 1 else f"{len(curves)} cases"
    return draw(
        f"{name}: relative difference from the baseline",
        [*band, *(Series(text, curve.points, style) for text, curve, style in _styled(texts, named))],
        Scales(log_y=True),
        limit=(limits[-1], allowed) if limits else None,
        describes=f"how far the {name} of every step of {count} is from the baseline's, relative; "
        + "; ".join([*texts, *(view.name for view in band), *([allowed] if allowed else [])]),
    )


def _at_most(worst: float) -> str:
    return f"at most {worst:.1e}" if worst else "identical"


def _gap(points: Sequence[Point]) -> str:
    missing = next((x for x, y in points if y is None), None)
    return "" if missing is None else f", no number at step {missing:g}"


def _numbers(baseline: Against, group: Sequence[Against], key: str, name: str, of: str) -> Chart | None:
    """The baseline's numbers, those of cases that failed, and the others as a band."""
    failed = [curve for curve in _curves(group, key) if not curve.shown.case.passed]
    named = failed[: LINES if len(failed) <= LINES else NAMED]
    lines = [curve.shown for curve in named]
    rest = [view for view in group if view not in lines and any(y is not None for _, y in _points(view.case, key))]
    if len(rest) == 1:
        others: list[Series | ShadedBand] = [Series(rest[0].label, _points(rest[0].case, key), "line-0")]
    else:
        count = f"the other {len(rest)} cases" if lines else f"{len(rest)} cases"
        band = ShadedBand(count, _edges(_points(view.case, key) for view in rest))
        others = [band] if rest else []
    texts = [f"{view.label}: failed" for view in lines]
    series = [Series(text, _points(curve.shown.case, key), style) for text, curve, style in _styled(texts, named)]
    return draw(
        f"{name}{of}",
        [Series("baseline", _points(baseline.case, key), "line-baseline"), *others, *series],
        describes=f"{name} of every step of {baseline.case.id}; "
        + "; ".join([*texts, *(view.name for view in others)]),
    )


def _styled(texts: Sequence[str], curves: Sequence[_Curve]) -> Iterable[tuple[str, _Curve, str]]:
    """A style for each line: dashes by its place, red for those that failed."""
    for index, (text, curve) in enumerate(zip(texts, curves, strict=True)):
        yield text, curve, f"line-{index}" if curve.shown.case.passed else f"line-failed-{index}"


def _edges(lines: Iterable[Sequence[Point]]) -> list[tuple[float, float | None, float | None]]:
    """By x the least and the largest of all lines."""
    by_step: dict[float, list[float]] = {}
    for points in lines:
        for x, y in points:
            by_step.setdefault(x, []).extend([] if y is None else [y])
    return [(x, min(values, default=None), max(values, default=None)) for x, values in sorted(by_step.items())]


def bandwidth_chart(bandwidth: MeasuredBandwidth | None) -> Chart | None:
    """What all_reduce moved, by message size."""
    if bandwidth is None:
        return None
    floor = bandwidth.floor_gigabytes_per_second
    return draw(
        "all_reduce, bus bandwidth in GB/s",
        [Series("measured", [(float(p.bytes), p.bus_gigabytes_per_second) for p in bandwidth.points], "line-0")],
        Scales(x_label="message size", log_x=True, from_zero=True, x_text=bytes_text),
        limit=(floor, f"at least {floor:g}") if floor else None,
        describes=f"bandwidth by message size, {bandwidth.ranks} ranks, {bandwidth.backend}",
    )
