"""The metrics of a run as columns of numbers, read from ``metrics.jsonl`` as it grows: 100,000 rows fit in memory, and any part of a curve is thinned at once.

A column is made numbers when it is asked for. A row that no pattern of ``RowPatterns`` matches is parsed as JSON, and its new keys are added to the patterns.
"""

import json
import math
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tandem.report.row_patterns import RowPatterns, Shape

Axis = Literal["step", "time"]
BLOCK = 16
"""Rows whose ranges are kept, so that a curve of many rows is thinned without reading each."""
STEP_SECONDS = "timing_s/step"
_MOST_PENDING = 20_000
"""Rows of which a column holds the text."""
_NAN = math.nan


@dataclass(slots=True)
class _Column:
    """The values of one metric, NaN where a row has no finite one. ``pending``: values of the newest rows as their text or as numbers. ``is_number``: whether a
    value is known to be finite. ``low``, ``high``, ``total``, ``count``: of each whole block of rows."""

    numbers: "array[float]"
    has_gaps: bool
    is_number: bool = False
    pending: list[bytes | float] = field(default_factory=list)
    low: "array[float]" = field(default_factory=lambda: array("d"))
    high: "array[float]" = field(default_factory=lambda: array("d"))
    total: "array[float]" = field(default_factory=lambda: array("d"))
    count: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def values(self) -> "array[float]":
        if self.pending:
            try:
                part = array("d", map(float, self.pending))
            except ValueError:
                part = array("d", map(_number, self.pending))
            if not math.isfinite(sum(part)):
                part = array("d", (value if math.isfinite(value) else _NAN for value in part))
                self.has_gaps = True
            self.is_number = self.is_number or any(value == value for value in part)
            self.numbers.extend(part)
            self.pending.clear()
        return self.numbers

    def summary(self, start: int, stop: int) -> tuple[float, float, float, int]:
        """Returns minimum, maximum, sum and number of the finite values of the rows from ``start`` to ``stop``."""
        part: Sequence[float] = self.values[start:stop]
        if self.has_gaps:
            part = [value for value in part if value == value]
        return (min(part), max(part), sum(part), len(part)) if part else (_NAN, _NAN, 0.0, 0)

    def extend_blocks(self) -> None:
        for start in range(len(self.low) * BLOCK, len(self.values) - BLOCK + 1, BLOCK):
            low, high, total, count = self.summary(start, start + BLOCK)
            self.low.append(low)
            self.high.append(high)
            self.total.append(total)
            self.count.append(count)


@dataclass(frozen=True, slots=True)
class Thinned:
    """A part of a curve: means of equal numbers of rows with their ranges (empty where each row has its own point); ``None``: no finite value."""

    y: list[float | None]
    low: list[float | None]
    high: list[float | None]


class Columns:
    """The rows of ``path``, of which ``follow`` reads what is new. ``problem``: one line about a row that could not be read, empty without one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.steps: array[int] = array("q")
        self.seconds: array[float] = array("d")
        self.problem = ""
        self._columns: dict[str, _Column] = {}
        self._patterns: RowPatterns | None = None
        self._offset, self._lines, self._inode = 0, 0, -1

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def keys(self) -> list[str]:
        """The metrics that have a finite value in some row."""
        return [key for key, column in self._columns.items() if column.is_number or (column.values and column.is_number)]

    # -- reading -------------------------------------------------------------------------------------------------------

    def follow(self) -> bool:
        """Reads the rows that were added; all again where a resume has cut the file. Returns whether anything has changed."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                is_cut = self._inode >= 0 and (found.st_ino != self._inode or found.st_size < self._offset)
                if is_cut:
                    self._forget()
                self._inode = found.st_ino
                file.seek(self._offset)
                data = file.read(found.st_size - self._offset)
        except FileNotFoundError:
            had = len(self) > 0
            self._forget()
            return had
        whole = data.rfind(b"\n") + 1
        self._add(data[:whole].split(b"\n")[:-1])
        self._offset += whole
        return is_cut or whole > 0

    def _add(self, lines: Sequence[bytes]) -> None:
        batch: list[tuple[bytes, ...]] = []
        batch_of: Shape | None = None
        for line in lines:
            self._lines += 1
            shape, texts = (None, None) if self._patterns is None else self._patterns.split(line)
            if shape is not batch_of or texts is None:
                self._flush(batch, batch_of)
                batch_of = shape
            if texts is not None:
                batch.append(texts)
            else:
                self._parse(line)
        self._flush(batch, batch_of)

    def _flush(self, batch: list[tuple[bytes, ...]], shape: Shape | None) -> None:
        """Adds rows that were split, all of one shape."""
        if not batch or self._patterns is None:
            return
        parts = self._patterns.of_all(shape, batch)
        for (key, column), texts in zip(self._columns.items(), parts, strict=True):
            column.pending.extend(texts)
            if key == "step":
                self.steps.extend(map(int, texts))
            if len(column.pending) > _MOST_PENDING:
                column.values  # noqa: B018  (makes them numbers)
        batch.clear()
        self._count_seconds()

    def _count_seconds(self) -> None:
        """Brings the time since the start up to the newest row."""
        column = self._columns.get(STEP_SECONDS)
        so_far = self.seconds[-1] if self.seconds else 0.0
        for seconds in column.values[len(self.seconds) :] if column is not None else [0.0] * (len(self.steps) - len(self.seconds)):
            so_far += seconds if seconds == seconds else 0.0
            self.seconds.append(so_far)

    def _parse(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int or abs(row["step"]) >= 2**62:
            self.problem = self.problem or f"line {self._lines} of {self.path.name} is not a metrics row and is left out; 'tandem verify' says what is damaged"
            return
        rows = len(self.steps)
        self._learn(list(row), rows)
        for key, column in self._columns.items():
            value = _finite(row.get(key))
            column.is_number = column.is_number or value is not None
            column.pending.append(_NAN if value is None else value)
        self.steps.append(row["step"])
        self._count_seconds()

    def _learn(self, keys: Sequence[str], rows: int) -> None:
        """Makes columns of new keys, in the order of their row, and the pattern of all keys."""
        if all(key in self._columns for key in keys):
            return
        order = list(self._columns)
        for place, key in enumerate(keys):
            if key not in self._columns:
                self._columns[key] = _Column(array("d", [_NAN]) * rows, has_gaps=rows > 0)
                order.insert(order.index(keys[place - 1]) + 1 if place else 0, key)
        self._columns = {key: self._columns[key] for key in order}
        self._patterns = RowPatterns(order)

    # -- values --------------------------------------------------------------------------------------------------------

    def last_row(self) -> dict[str, Any] | None:
        """Returns the finite numbers of the newest row, ``None`` without one."""
        if not self.steps:
            return None
        newest = {key: _number(column.pending[-1]) if column.pending else column.numbers[-1] for key, column in self._columns.items()}
        return {**{key: value for key, value in newest.items() if value == value}, "step": self.steps[-1]}

    def finite(self, key: str) -> Sequence[float]:
        """Returns the finite values of ``key``, empty where no row has one."""
        column = self._columns.get(key)
        if column is None:
            return ()
        values = column.values
        return [value for value in values if value == value] if column.has_gaps else values

    def extremes(self, key: str) -> tuple[float, float]:
        """Returns the smallest and the largest value of ``key``, (0, 0) where no row has one."""
        column = self._columns.get(key)
        if column is None:
            return 0.0, 0.0
        low, high = [], []
        for part_low, part_high, _, count in self._parts(column, 0, len(self), 64 * BLOCK):
            if count:
                low.append(part_low)
                high.append(part_high)
        return (min(low), max(high)) if low else (0.0, 0.0)

    def rows_between(self, low: float | None, high: float | None, axis: Axis) -> tuple[int, int]:
        """Returns the rows whose step, or whose time since the start, is in the range, with one more at each side, so that a line goes on."""
        places: Sequence[float] = self.steps if axis == "step" else self.seconds
        start = 0 if low is None else max(0, bisect_left(places, low) - 1)
        stop = len(places) if high is None else min(len(places), bisect_right(places, high) + 1)
        return start, max(start, stop)

    def thinning(self, start: int, stop: int, points: int) -> int:
        """Returns how many rows one point of at most ``points`` represents: 1, or a power of 2, so that points stay where they are while a run grows."""
        size = 1
        while -(-(stop - start) // size) > points:
            size *= 2
        return size

    def x(self, start: int, stop: int, size: int, axis: Axis) -> list[float]:
        """Returns the place of each point on the horizontal axis: the middle of its rows."""
        places: Sequence[float] = self.steps if axis == "step" else self.seconds
        if size == 1:
            return list(places[start:stop])
        return [(places[first] + places[last - 1]) / 2 for first, last in _buckets(start, stop, size)]

    def thinned(self, key: str, start: int, stop: int, size: int) -> Thinned:
        """Returns the values of ``key`` in the rows from ``start`` to ``stop``, ``size`` rows a point."""
        column = self._columns.get(key)
        if column is None:
            return Thinned([None] * sum(1 for _ in _buckets(start, stop, size)), [], [])
        if size == 1:
            return Thinned([_shown(value) for value in column.values[start:stop]], [], [])
        parts = list(self._parts(column, start, stop, size))
        # The sum of very large values is infinite.
        y = [_shown(total / count if math.isfinite(total) else low / 2 + high / 2) if count else None for low, high, total, count in parts]
        return Thinned(y, [_shown(part[0]) for part in parts], [_shown(part[1]) for part in parts])

    def _parts(self, column: _Column, start: int, stop: int, size: int) -> Iterator[tuple[float, float, float, int]]:
        if size >= BLOCK:
            column.extend_blocks()
        for first, last in _buckets(start, stop, size):
            if size < BLOCK or first % BLOCK or last % BLOCK:
                yield column.summary(first, last)
                continue
            blocks = range(first // BLOCK, last // BLOCK)
            counts = column.count[blocks.start : blocks.stop]
            if 0 in counts:
                yield column.summary(first, last)
            else:
                part = slice(blocks.start, blocks.stop)
                yield min(column.low[part]), max(column.high[part]), sum(column.total[part]), sum(counts)


def _buckets(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields the rows of each point. Their ends are multiples of ``size``."""
    first = start
    while first < stop:
        last = min(stop, (first // size + 1) * size)
        yield first, last
        first = last


def _number(text: bytes | float) -> float:
    """Returns the number of a value, NaN where it is none."""
    try:
        value = _finite(json.loads(text)) if isinstance(text, bytes) else text
    except ValueError:
        value = None
    return _NAN if value is None else value


def _finite(value: Any) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: float) -> float | None:
    """Returns ``value`` with the digits that a reader can use, ``None`` for NaN."""
    return float(f"{value:.7g}") if value == value else None
