"""Metrics as columns: the values of the rows, whatever the rows are, and any part thinned as the rows say."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from tandem.report.columns import BLOCK, Columns
from tandem.runtime.records.metrics import MetricsFile, read_rows

NAN = float("nan")


def value_of(row: dict[str, Any], key: str) -> float | None:
    """Returns the finite number that a row has for ``key``."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def odd_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows in which metrics come, go and are no numbers, whose keys have every kind of letter."""
    rng = random.Random(seed)
    names = ("a", 'q"uote', "comma, and: colon", "back\\slash", "ümlaut", "timing_s/step", "b.c+(d)", "only/late", "text")
    rows = []
    for step in range(count):
        row: dict[str, Any] = {"step": step}
        for name in names:
            if name == "only/late" and step < count // 2:
                continue
            if rng.random() < 0.9:
                odd = rng.choice((NAN, math.inf, -math.inf, None, True, 7, "a, b: 3}", 1e308, -0.0, 5e-324))
                row[name] = "word" if name == "text" else odd if rng.random() < 0.1 else rng.gauss(0, 1)
        rows.append(row)
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_columns_have_the_values_of_the_rows_however_they_were_read(tmp_path: Path, seed: int) -> None:
    rows, path = odd_rows(300, seed), tmp_path / "metrics.jsonl"
    columns, rng, metrics = Columns(path), random.Random(seed), MetricsFile(path)
    for row in rows:
        metrics.append(row)
        if rng.random() < 0.1:
            assert columns.follow()
    metrics.close()
    columns.follow()
    assert not columns.follow() and columns.problem == "" and list(columns.steps) == list(range(300))
    keys = {key for row in read_rows(path) for key in row if value_of(row, key) is not None}
    assert set(columns.keys) == keys
    for key in keys:
        expected = [value_of(row, key) for row in rows]
        assert [None if value != value else value for value in columns._columns[key].values] == expected, key
    seconds = 0.0
    for place, row in enumerate(rows):
        seconds += value_of(row, "timing_s/step") or 0.0
        assert columns.seconds[place] == seconds


@pytest.mark.parametrize("size", [1, 2, 8, BLOCK, 4 * BLOCK, 64 * BLOCK])
def test_a_part_is_thinned_to_the_mean_and_the_range_of_its_rows(tmp_path: Path, size: int) -> None:
    rows, path = odd_rows(1000, 7), tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = Columns(path)
    columns.follow()
    for start, stop in ((0, 1000), (37, 911), (5, 6), (1000, 1000)):
        thin, places = columns.thinned("a", start, stop, size), columns.x(start, stop, size, "step")
        bounds = sorted({start, *range(-(-start // size) * size, stop, size), stop})
        parts = list(itertools.pairwise(bounds))
        assert len(thin.y) == len(places) == len(parts)
        for place, (first, last) in enumerate(parts):
            known = [value for row in rows[first:last] if (value := value_of(row, "a")) is not None]
            if not known:
                assert thin.y[place] is None
                continue
            mean = math.fsum(value / len(known) for value in known)
            assert thin.y[place] == pytest.approx(mean, rel=1e-6, abs=1e-9) or max(known) > 1e307
            assert places[place] == (first + last - 1) / 2
            if size > 1:
                assert (thin.low[place], thin.high[place]) == pytest.approx((min(known), max(known)), rel=1e-6)


def test_thinning_is_a_power_of_two_so_that_points_stay_while_a_run_grows(tmp_path: Path) -> None:
    columns = Columns(tmp_path / "none")
    assert not columns.follow() and len(columns) == 0 and columns.thinned("a", 0, 0, 1).y == []
    for rows in (1, 999, 1000, 1001, 100_000):
        size = columns.thinning(0, rows, 1000)
        assert size & (size - 1) == 0 and rows / size <= 1000 and (size == 1 or rows / (size / 2) > 1000)


def test_damaged_lines_are_left_out_and_the_first_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = (
        '{"step": 0, "a": 1.0}', "[" * 50_000, '{"step": 1.5, "a": 2}', '{"step": 1, "a": {"b": 2}}', '{"a": 1}', '{"step": 99999999999999999999}',
        '{"step": 2, "a": 3.0}',
    )  # fmt: skip
    path.write_text("\n".join(lines) + '\n{"step": 3')
    columns = Columns(path)
    columns.follow()
    assert list(columns.steps) == [0, 1, 2] and list(columns.finite("a")) == [1.0, 3.0]
    assert columns.problem == "line 2 of metrics.jsonl is not a metrics row and is left out; 'tandem verify' says what is damaged"
    with path.open("a") as file:
        file.write(', "a": 4.0}\n')
    columns.follow()
    assert list(columns.steps) == [0, 1, 2, 3], "a row that was torn is read when it is whole"
