"""Any part of any curves of a run, thinned to the points that a screen can show."""

from collections.abc import Sequence
from typing import Any

from tandem.dashboard.open_run import OpenRun
from tandem.report.columns import Axis

MOST_POINTS = 4000
MOST_KEYS = 64


def curves(run: OpenRun, keys: Sequence[str], low: float | None, high: float | None, points: int, axis: Axis) -> dict[str, Any]:
    """Returns the curves ``keys`` between ``low`` and ``high`` (``None``: from the first or to the last row) with at most ``points`` points each: the mean of
    equal numbers of rows and, where that is more than one, the smallest and the largest value."""
    with run.columns() as columns:
        start, stop = columns.rows_between(low, high, axis)
        size = columns.thinning(start, stop, max(2, min(points, MOST_POINTS)))
        found = {}
        for key in list(dict.fromkeys(keys))[:MOST_KEYS]:
            part = columns.thinned(key, start, stop, size)
            found[key] = {"y": part.y, "low": part.low, "high": part.high} if size > 1 else {"y": part.y}
        whole = (columns.steps if axis == "step" else columns.seconds) if len(columns) else [0, 0]
        return {"x": columns.x(start, stop, size, axis), "rows_each": size, "rows": len(columns), "whole": [whole[0], whole[-1]], "series": found}
