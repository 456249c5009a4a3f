"""Curves as data of the page: series over the steps of a run, thinned to the points that a screen can show."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Row = Mapping[str, Any]
MOST_POINTS = 600
"""Points of one series; a chart is at most about a thousand pixels wide."""
LEAST_POINTS = 60
ALL_POINTS = 60_000
"""Points of a page, so that it stays below a megabyte."""


@dataclass(frozen=True, slots=True)
class Series:
    """A curve of run number ``run``.

    Args:
        y: a value for each row of the run, or for each of ``x``; ``None``: no value there.
        x: steps (``None``: those of the run's rows).
        error: the standard error of each value.
        points: whether each value is marked, because there are few.
    """

    name: str
    y: Sequence[float | None]
    x: Sequence[int] | None = None
    run: int = 0
    error: Sequence[float] | None = None
    points: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Series with one vertical axis, which holds ``floor`` and ``ceiling`` and has ``lines`` at (value, name). ``stack``: values are areas on top of
    each other."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    kind: Literal["line", "stack"] = "line"
    floor: float | None = None
    ceiling: float | None = None
    lines: Sequence[tuple[float, str]] = field(default_factory=tuple)


def finite(value: Any) -> float | None:
    """Returns ``value`` as a number, ``None`` where it is none or not finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def column(rows: Sequence[Row], key: str) -> list[float | None]:
    """Returns the values of ``key`` in ``rows``, ``None`` where a row has none."""
    return [finite(row.get(key)) for row in rows]


def has_values(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def points_each(charts: Sequence[Chart]) -> int:
    """Returns how many points each series may have."""
    count = sum(len(chart.series) for chart in charts)
    return min(MOST_POINTS, max(LEAST_POINTS, ALL_POINTS // max(count, 1)))


def run_json(name: str, rows: Sequence[Row], points: int) -> dict[str, Any]:
    """Returns the horizontal axes of a run: the steps of its rows, and the seconds of all steps so far."""
    so_far, total = [], 0.0
    for row in rows:
        total += finite(row.get("timing_s/step")) or 0.0
        so_far.append(total)
    steps = [float(row["step"]) for row in rows]
    return {"name": name, "steps": _means(steps, points), "seconds": _means(so_far, points)}


def chart_json(chart: Chart, points: int) -> dict[str, Any]:
    """Returns ``chart`` as plain data with at most ``points`` points in a series: means of equal numbers of rows, with their ranges."""
    shown: dict[str, Any] = {"kind": chart.kind, "series": [_series_json(series, points) for series in chart.series]}
    for key in ("floor", "ceiling"):
        if getattr(chart, key) is not None:
            shown[key] = getattr(chart, key)
    if chart.lines:
        shown["lines"] = [{"y": rounded(y), "name": name} for y, name in chart.lines]
    return shown


def _series_json(series: Series, points: int) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": series.name, "run": series.run, "y": _means(series.y, points)}
    if series.x is not None:
        shown["x"] = _means([float(x) for x in series.x], points)
    if len(series.y) > points:
        shown["low"], shown["high"] = _apply(series.y, points, min), _apply(series.y, points, max)
    elif series.error is not None:
        shown["error"] = [rounded(value) for value in series.error]
    if series.points:
        shown["points"] = True
    return shown


def _means(values: Sequence[float | None], points: int) -> list[float | None]:
    return _apply(values, points, lambda part: math.fsum(part) / len(part))


def _apply(values: Sequence[float | None], points: int, what: Any) -> list[float | None]:
    size = -(-len(values) // points) or 1
    parts = ([v for v in values[start : start + size] if v is not None] for start in range(0, len(values), size))
    return [rounded(what(part)) if part else None for part in parts]


def rounded(value: float) -> float:
    """Returns ``value`` with the digits that a curve can show."""
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e9 else short
