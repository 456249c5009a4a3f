"""Curves as data of a page: series over the steps of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]


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
    """Series with one vertical axis, which holds ``floor`` and ``ceiling`` and has ``lines`` at (value, name)."""

    title: str
    series: Sequence[Series]
    unit: str = ""
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
