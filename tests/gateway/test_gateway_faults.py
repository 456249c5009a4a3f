"""The table of faults: after each, every request is answered once, refused or visibly cut, and nothing is left behind."""

from pathlib import Path

import pytest
from fault_rows import ROWS, Row, why_not

SMALLEST = ("backend killed",)
"""Of the others most have a smaller case among the tests of the proxy, the queue and the limits."""

COUNTS = {"gateway killed with open streams": 200, "streams with random disconnects": 2048}
"""Streams of the rows that need so many, in place of 40 requests."""


def check(row: Row, folder: Path, count: int) -> None:
    if reason := why_not(row):
        pytest.skip(reason)
    tally = row.run(folder, count)
    assert not tally.wrong, tally
    assert tally.answered > 0 and (tally.cut > 0 or not row.cuts), tally


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in SMALLEST], ids=lambda row: row.name)
def test_a_fault_loses_no_request_in_silence_and_leaves_nothing_behind(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path, 12)


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_fault_loses_no_request_in_silence_and_leaves_nothing_behind(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path, COUNTS.get(row.name, 40))
