"""The answers of Prometheus' HTTP API (https://prometheus.io/docs/prometheus/latest/querying/api/) from a metrics database, for Grafana and the dashboard."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tandem.metrics_database.promql.evaluate import Evaluator, Labels, Read, Value
from tandem.metrics_database.promql.parse import parse, seconds_of
from tandem.metrics_database.promql.syntax import NAME, Matcher, Selector
from tandem.types import UserError

MOST_POINTS = 11_000
"""Moments of one query, as in Prometheus."""
_EVER_MS = 2**62
Parameters = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Answers:
    """Of the series that ``read`` gives, those of rules among them."""

    read: Read

    def answer(self, path: str, given: Parameters) -> Any:
        """Returns the ``data`` of the API's ``path`` below ``/api/v1/``. Raises ``UserError`` where it, or a parameter, is not there."""
        parts = path.strip("/").split("/")
        found: Callable[[Parameters], Any] | None = {"query": self._query, "query_range": self._range, "series": self._series, "labels": self._labels}.get(path)
        if len(parts) == 3 and parts[0] == "label" and parts[2] == "values":
            return sorted({value for labels in self._matching(given) for name, value in labels if name == parts[1]})
        if found is None:
            raise UserError(f"there is no /api/v1/{path[:100]}; there are query, query_range, series, labels and label/NAME/values")
        return found(given)

    def instant(self, query: str, time_ms: int) -> Value:
        """Returns the value of ``query`` at a moment."""
        return Evaluator(self.read, [time_ms]).at(parse(query), time_ms)

    def over(self, query: str, times_ms: Sequence[int]) -> dict[Labels, list[tuple[int, float]]]:
        """Returns the values of ``query`` at each of ``times_ms``, by series."""
        expression, found = parse(query), dict[Labels, list[tuple[int, float]]]()
        evaluator = Evaluator(self.read, times_ms)
        for when in times_ms:
            value = evaluator.at(expression, when)
            if isinstance(value, str):
                raise UserError("a text has no values over time")
            for labels, each in [((), value)] if isinstance(value, float) else value:
                found.setdefault(labels, []).append((when, each))
        return found

    def _query(self, given: Parameters) -> Any:
        query, now_ms = _one(given, "query"), round(time.time() * 1000)
        time_ms = _milliseconds(given, "time", now_ms)
        value = self.instant(query, time_ms)
        if isinstance(value, str | float):
            return {"resultType": "string" if isinstance(value, str) else "scalar", "result": _point(time_ms, value)}
        return {"resultType": "vector", "result": [{"metric": dict(labels), "value": _point(time_ms, each)} for labels, each in value]}

    def _range(self, given: Parameters) -> Any:
        query, start, end = _one(given, "query"), _milliseconds(given, "start"), _milliseconds(given, "end")
        step = round(seconds_of(_one(given, "step")) * 1000)
        if end < start or step < 1:
            raise UserError("'end' is before 'start', or 'step' is not above 0")
        if (end - start) // step >= MOST_POINTS:
            raise UserError(f"{(end - start) // step + 1} moments are more than {MOST_POINTS}; take a larger 'step'")
        found = self.over(query, range(start, end + 1, step))
        return {"resultType": "matrix", "result": [{"metric": dict(labels), "values": [_point(*each) for each in values]} for labels, values in found.items()]}

    def _series(self, given: Parameters) -> Any:
        return [dict(labels) for labels in self._matching(given)]

    def _labels(self, given: Parameters) -> Any:
        return sorted({name for labels in self._matching(given) for name, _ in labels})

    def _matching(self, given: Parameters) -> list[Labels]:
        start, end = _milliseconds(given, "start", 0), _milliseconds(given, "end", _EVER_MS)
        wanted = given.get("match[]") or ()
        selectors = [parse(each) for each in wanted] or [Selector((Matcher(NAME, "!=", ""),))]
        found: dict[Labels, None] = {}
        for selector in selectors:
            if not isinstance(selector, Selector):
                raise UserError("'match[]' is not the name of series with conditions on their labels")
            found.update(dict.fromkeys(series.labels for series in self.read(selector.matchers, start, end)))
        return list(found)


def _one(given: Parameters, name: str) -> str:
    values = given.get(name) or ()
    if not values:
        raise UserError(f"the parameter '{name}' is missing")
    return values[0]


def _milliseconds(given: Parameters, name: str, default: int | None = None) -> int:
    """Returns a parameter that is a Unix time in seconds, or a date of RFC 3339, in milliseconds."""
    if not given.get(name) and default is not None:
        return default
    text = _one(given, name)
    if "T" in text:
        from datetime import datetime

        try:
            return round(datetime.fromisoformat(text).timestamp() * 1000)
        except ValueError:
            pass
    try:
        return round(float(text) * 1000)
    except (ValueError, OverflowError):
        raise UserError(f"the parameter '{name}' is '{text[:50]}', which is no time; give seconds since 1970 or a date such as 2026-11-27T12:00:00Z") from None


def _point(time_ms: int, value: float | str) -> list[Any]:
    return [time_ms / 1000, value if isinstance(value, str) else number_text(value)]


def number_text(value: float) -> str:
    """Returns ``value`` as Prometheus writes it."""
    if not math.isfinite(value):
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else format(Decimal(repr(value)), "f")
