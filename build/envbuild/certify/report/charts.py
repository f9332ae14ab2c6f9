"""Line charts as numbers for an SVG: paths, ticks and labels. How they look is the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log10
from typing import TypeGuard

# Small enough that text stays readable where a phone shows a chart over its whole width.
WIDTH, HEIGHT = 360, 216
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 34
TICKS = 4
# What differs by less than this, relative, is level: floats have no round numbers in between.
LEVEL = 1e-12
# Below it floats lose their digits, and powers of ten are zero; above the other they overflow.
LEAST, MOST = 1e-300, 1e300
# On a logarithmic scale zero has its place below all powers, this far from the next.
ZERO_GAP = 22
Point = tuple[float, "float | None"]
Place = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line: points by x, None where there is no number; ``style`` is a class of the page's."""

    name: str
    points: Sequence[Point]
    style: str


@dataclass(frozen=True)
class ShadedBand:
    """Many lines as one: by x the least and the largest of their numbers, None where there is no number."""

    name: str
    edges: Sequence[tuple[float, float | None, float | None]]
    style: str = "band"


@dataclass(frozen=True)
class Tick:
    """A place on an axis, and what stands there."""

    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """A series or a band as SVG draws it; ``lone`` are the dots without a neighbour, which no line shows."""

    name: str
    style: str
    path: str
    dots: tuple[Place, ...]
    lone: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Limit:
    """A horizontal line: what is allowed, or asked for."""

    at: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart, ready to be drawn."""

    title: str
    describes: str
    x_label: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limit: Limit | None = None
    legend: tuple[tuple[str, str], ...] = ()
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: float = WIDTH - RIGHT
    bottom: float = HEIGHT - BOTTOM


@dataclass(frozen=True)
class Axis:
    """Numbers to places: linear, or by powers with a place for zero."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: tuple[float, ...] = ()
    zero: float = 0.0

    def place(self, value: float) -> float:
        if self.log and value <= LEAST:
            return self.zero
        low, high, value = (
            (log10(self.low), log10(self.high), log10(value)) if self.log else (self.low, self.high, value)
        )
        share = (value - low) / (high - low)
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)


@dataclass(frozen=True)
class Scales:
    """The scales of a chart; ``x_text`` is the text of a number on the x axis."""

    x_label: str = "step"
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False
    x_text: Callable[[float], str] | None = None


STEPS = Scales()


def draw(
    title: str,
    series: Sequence[Series | ShadedBand],
    scales: Scales = STEPS,
    *,
    describes: str = "",
    limit: tuple[float, str] | None = None,
) -> Chart | None:
    """A chart of these lines; None where there is nothing to draw."""
    log_y = scales.log_y
    drawn = [(x, y) for curve in series for x, y in _numbers(curve) if _can_be_drawn(y, log=log_y)]
    values = [y for _, y in drawn if y > LEAST or not log_y]
    if not values:
        return None
    with_zero = log_y and len(values) < len(drawn)
    values += [limit[0]] if limit else []
    x_axis = _axis([x for x, _ in drawn], LEFT, WIDTH - RIGHT, log=scales.log_x, tight=True)
    bottom = HEIGHT - BOTTOM - (ZERO_GAP if with_zero else 0)
    y_axis = _axis([*values, *([0.0] if scales.from_zero and not log_y else [])], bottom, TOP, log=log_y)
    y_axis = replace(y_axis, zero=HEIGHT - BOTTOM)
    y_text = _power if log_y else _plain(y_axis.ticks)
    return Chart(
        title=title,
        describes=describes,
        x_label=scales.x_label,
        lines=tuple(
            _area(curve, x_axis, y_axis) if isinstance(curve, ShadedBand) else _line(curve, x_axis, y_axis)
            for curve in series
        ),
        x_ticks=tuple(Tick(x_axis.place(x), (scales.x_text or _plain(x_axis.ticks))(x)) for x in x_axis.ticks),
        y_ticks=(
            *([Tick(y_axis.zero, "0")] if with_zero else []),
            *(Tick(y_axis.place(y), y_text(y)) for y in y_axis.ticks),
        ),
        limit=Limit(y_axis.place(limit[0]), limit[1]) if limit else None,
        legend=tuple((curve.style, curve.name) for curve in series),
    )


def _can_be_drawn(y: float | None, *, log: bool) -> TypeGuard[float]:
    return y is not None and abs(y) < MOST and (y >= 0 or not log)


def _line(series: Series, x_axis: Axis, y_axis: Axis) -> Line:
    runs: list[list[Place]] = [[]]
    for x, y in series.points:
        if _can_be_drawn(y, log=y_axis.log):
            runs[-1].append((x_axis.place(x), y_axis.place(y)))
        elif runs[-1]:
            runs.append([])  # a number that is not there is no line
    return Line(
        series.name,
        series.style,
        "".join(map(_path, runs)),
        tuple(place for run in runs for place in run),
        tuple(run[0] for run in runs if len(run) == 1),
    )


def _area(band: ShadedBand, x_axis: Axis, y_axis: Axis) -> Line:
    """What lies between the edges, step by step."""
    runs: list[list[tuple[Place, Place]]] = [[]]
    for x, low, high in band.edges:
        if _can_be_drawn(low, log=y_axis.log) and _can_be_drawn(high, log=y_axis.log):
            at = x_axis.place(x)
            runs[-1].append(((at, y_axis.place(low)), (at, y_axis.place(high))))
        elif runs[-1]:
            runs.append([])
    around = [[*(high for _, high in run), *(low for low, _ in reversed(run))] for run in runs if run]
    path = "".join(f"{_path(places)}Z" for places in around)
    return Line(band.name, band.style, path, tuple(place for places in around for place in places))


def _path(places: Sequence[Place]) -> str:
    return "".join(f"{'L' if index else 'M'}{x:g} {y:g}" for index, (x, y) in enumerate(places))


def _numbers(curve: Series | ShadedBand) -> list[Point]:
    if isinstance(curve, Series):
        return list(curve.points)
    return [(x, y) for x, *edges in curve.edges for y in edges]


def _axis(values: Sequence[float], start: float, end: float, *, log: bool, tight: bool = False) -> Axis:
    low, high = min(values), max(values)
    if log and not tight:
        return _decades(low, high, start, end)
    if log:
        high = high if high > low else low * 10
        return Axis(low, high, start, end, log=True, ticks=_spread(sorted(set(values))))
    if high - low <= max(LEAST, LEVEL * max(abs(low), abs(high))):
        # A level line has space above and below.
        margin = abs(low) / 2 if abs(low) > LEAST else 1.0
        low, high = low - margin, high + margin
    ticks = _round_ticks(low, high, whole=tight)
    if tight:
        return Axis(low, high, start, end, ticks=ticks)
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), start, end, ticks=ticks)


def _decades(low: float, high: float, start: float, end: float) -> Axis:
    first, last = math.floor(log10(low)), math.ceil(log10(high))
    last = max(last, first + 1)
    step = max(1, math.ceil((last - first) / TICKS))
    ticks = tuple(10.0**power for power in range(first, last + 1, step))
    return Axis(10.0**first, 10.0**last, start, end, log=True, ticks=ticks)


def _spread(values: Sequence[float]) -> tuple[float, ...]:
    """Some of the values, the first and the last among them, far enough from each other for their text."""
    apart = (log10(values[-1]) - log10(values[0])) / TICKS
    kept = list(values[:1])
    for value in values[1:-1]:
        if min(log10(value) - log10(kept[-1]), log10(values[-1]) - log10(value)) >= apart:
            kept.append(value)
    return (*kept, *values[-1:]) if len(values) > 1 else tuple(kept)


def _round_ticks(low: float, high: float, *, whole: bool) -> tuple[float, ...]:
    """Round numbers that span the values; within them where the axis ends with the data."""
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(log10(raw))
    # 0.999 here and 1e-9 below leave room for rounding: in floats 0.3 / 0.1 is less than 3.
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
        first, last = math.ceil(low / step), math.floor(high / step)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # A multiple of a step has a rounding error in its last digits: 3 * 0.1 is 0.30000000000000004.
    return tuple(float(f"{index * step:.14g}") for index in range(first, last + 1)) or (low, high)


def _plain(ticks: Sequence[float]) -> Callable[[float], str]:
    """Text for ticks: as few digits as tell them apart."""
    digits = next((count for count in range(3, 15) if len({f"{tick:.{count}g}" for tick in ticks}) == len(ticks)), 15)
    return lambda value: f"{value:.{digits}g}"


def _power(value: float) -> str:
    """1e-05 as ``1e-5``."""
    return f"1e{round(log10(value))}"


def bytes_text(value: float) -> str:
    """A message size: ``64 MiB``."""
    power = next((power for power in range(3) if value < 1024 ** (power + 1)), 3)
    return f"{value / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
