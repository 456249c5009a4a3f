"""Evaluates expressions of PromQL at moments, over series that a reader gives."""

import math
import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.metrics_database.promql.functions import ON_RANGES, quantile_of_buckets
from tandem.metrics_database.promql.join import combined
from tandem.metrics_database.promql.syntax import NAME, Aggregation, Binary, Call, Expression, Matcher, Negated, Number, Selector, Text
from tandem.types import UserError

LOOKBACK_MS = 300_000
"""How old the newest value of a series may be; Prometheus' default."""
Labels = tuple[tuple[str, str], ...]
"""Names and values, by name."""
Vector = list[tuple[Labels, float]]
Value = float | str | Vector


@dataclass(frozen=True, slots=True)
class Series:
    """The samples of a series by time. ``times``: milliseconds. ``values``: ``None`` where the series has ended for now (Prometheus' staleness marker)."""

    labels: Labels
    times: Sequence[int]
    values: Sequence[float | None]


Read = Callable[[Sequence[Matcher], int, int], list[Series]]
"""Returns the series that match, with their samples between two times in milliseconds, both included."""


def matches(labels: Mapping[str, str], matchers: Iterable[Matcher]) -> bool:
    """Whether a series fits all of ``matchers``; a label that it does not have is empty."""
    for each in matchers:
        value = labels.get(each.label, "")
        is_equal = re.fullmatch(each.value, value) is not None if "~" in each.kind else value == each.value
        if is_equal != (each.kind in ("=", "=~")):
            return False
    return True


class Evaluator:
    """Evaluates at any of ``times_ms``, over the series that ``read`` gives."""

    def __init__(self, read: Read, times_ms: Sequence[int]) -> None:
        self._read = read
        self._first, self._last = min(times_ms), max(times_ms)
        self._series: dict[Selector, list[Series]] = {}

    def at(self, node: Expression, time_ms: int) -> Value:
        """Returns the value of ``node``. Raises ``UserError`` where its parts do not fit."""
        match node:
            case Number(value):
                return value
            case Text(text):
                return text
            case Selector():
                return self._selected(node, time_ms)
            case Negated(inner):
                given = self._numeric(inner, time_ms)
                return -given if isinstance(given, float) else [(without_name(labels), -each) for labels, each in given]
            case Aggregation():
                return _aggregated(node, self._vector(node.value, time_ms))
            case Binary():
                return combined(node, self._numeric(node.left, time_ms), self._numeric(node.right, time_ms))
            case Call():
                return self._called(node, time_ms)

    def _numeric(self, node: Expression, time_ms: int) -> float | Vector:
        value = self.at(node, time_ms)
        if isinstance(value, str):
            raise UserError(f"'{value[:50]}' is a text where a number should be")
        return value

    def _vector(self, node: Expression, time_ms: int) -> Vector:
        value = self.at(node, time_ms)
        if not isinstance(value, list):
            raise UserError(f"{value!r:.50} is where series should be")
        return value

    def _scalar(self, node: Expression, time_ms: int) -> float:
        value = self.at(node, time_ms)
        if not isinstance(value, float):
            raise UserError("series or a text are where a number should be")
        return value

    # -- series --------------------------------------------------------------------------------------------------------

    def _loaded(self, selector: Selector) -> list[Series]:
        if selector not in self._series:
            before = LOOKBACK_MS if selector.range_s is None else round(selector.range_s * 1000)
            self._series[selector] = self._read(selector.matchers, self._first - before, self._last)
        return self._series[selector]

    def _selected(self, selector: Selector, time_ms: int) -> Vector:
        if selector.range_s is not None:
            raise UserError("a range such as [5m] is where a function of ranges such as rate(...) should be around it")
        found: Vector = []
        for series in self._loaded(selector):
            place = bisect_right(series.times, time_ms) - 1
            if place >= 0 and series.times[place] >= time_ms - LOOKBACK_MS:
                value = series.values[place]
                if value is not None:
                    found.append((series.labels, value))
        return found

    def _on_range(self, node: Call, time_ms: int) -> Vector:
        if len(node.arguments) != 1 or not isinstance(node.arguments[0], Selector) or node.arguments[0].range_s is None:
            raise UserError(f"{node.name}() is of one range, for example {node.name}(tandem_steps_total[5m])")
        selector = node.arguments[0]
        start = time_ms - round((selector.range_s or 0) * 1000)
        found: Vector = []
        for series in self._loaded(selector):
            part = slice(bisect_left(series.times, start), bisect_right(series.times, time_ms))
            samples = [(when, value) for when, value in zip(series.times[part], series.values[part], strict=True) if value is not None]
            value = ON_RANGES[node.name](samples, start, time_ms)
            if value is not None:
                kept = series.labels if node.name == "last_over_time" else without_name(series.labels)
                found.append((kept, value))
        return found

    # -- functions -----------------------------------------------------------------------------------------------------

    def _called(self, node: Call, time_ms: int) -> Value:
        name, given = node.name, node.arguments
        if name in ON_RANGES:
            return self._on_range(node, time_ms)
        wanted = {"time": 0, "vector": 1, "abs": 1, "clamp_min": 2, "clamp_max": 2, "histogram_quantile": 2, "label_replace": 5}[name]
        if len(given) != wanted:
            raise UserError(f"{name}() has {len(given)} arguments; it needs {wanted}")
        if name == "time":
            return time_ms / 1000
        if name == "vector":
            return [((), self._scalar(given[0], time_ms))]
        if name == "histogram_quantile":
            return _quantiles(self._scalar(given[0], time_ms), self._vector(given[1], time_ms))
        if name == "label_replace":
            texts = [self.at(each, time_ms) for each in given[1:]]
            if not all(isinstance(each, str) for each in texts):
                raise UserError("the arguments of label_replace() after the first are texts")
            return _relabelled(self._vector(given[0], time_ms), *map(str, texts))
        act: Callable[[float], float] = abs
        if name != "abs":
            bound, choose = self._scalar(given[1], time_ms), max if name == "clamp_min" else min
            act = lambda value: choose(value, bound)
        return [(without_name(labels), act(value)) for labels, value in self._vector(given[0], time_ms)]


def without_name(labels: Labels) -> Labels:
    return tuple(pair for pair in labels if pair[0] != NAME)


def with_label(labels: Labels, name: str, value: str) -> Labels:
    """Returns ``labels`` with another one; an empty value is none."""
    kept = dict(labels)
    kept.pop(name, None)
    return tuple(sorted({**kept, **({name: value} if value else {})}.items()))


def _aggregated(node: Aggregation, vector: Vector) -> Vector:
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector:
        kept = tuple(pair for pair in labels if (pair[0] not in node.labels and pair[0] != NAME if node.is_without else pair[0] in node.labels))
        groups.setdefault(kept, []).append(value)
    fold: Callable[[list[float]], float] = {"sum": sum, "avg": _mean, "min": _least, "max": _most, "count": len}[node.name]  # type: ignore[assignment]
    return [(labels, float(fold(values))) for labels, values in groups.items()]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _least(values: list[float]) -> float:
    return min((value for value in values if value == value), default=math.nan)


def _most(values: list[float]) -> float:
    return max((value for value in values if value == value), default=math.nan)


def _quantiles(quantile: float, vector: Vector) -> Vector:
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in vector:
        upper = dict(labels).get("le")
        try:
            bound = float(upper) if upper is not None else math.nan
        except ValueError:
            bound = math.nan
        if bound == bound:
            groups.setdefault(tuple(pair for pair in labels if pair[0] not in ("le", NAME)), []).append((bound, value))
    return [(labels, quantile_of_buckets(quantile, sorted(buckets, key=operator.itemgetter(0)))) for labels, buckets in groups.items()]


def _relabelled(vector: Vector, target: str, replacement: str, source: str, pattern: str) -> Vector:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"'{pattern[:100]}' is no regular expression ({error})") from None
    template = re.sub(r"\$(\w+|\{\w+\})", lambda found: rf"\g<{found[1].strip('{}')}>", replacement.replace("\\", r"\\"))
    found = []
    for labels, value in vector:
        match = compiled.fullmatch(dict(labels).get(source, ""))
        found.append((labels if match is None else with_label(labels, target, match.expand(template)), value))
    return found
