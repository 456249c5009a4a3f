"""Rows of CSV files, whose first line names the columns. Every value is a text, as it is written."""

import csv
import io
from collections.abc import Iterator

from tandem.data.rows.row import Row

SEPARATORS = (",", ";", "\t", "|")
LONGEST_CELL = 2**27
"""Characters of a cell; Python's own limit is 131,072."""


def csv_rows(content: bytes, name: str, separator: str) -> Iterator[Row]:
    """Yields a row for each record of ``content``, whose place is the record's first line; an empty cell is an empty text."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Row(f"{name}:{content.count(chr(10).encode(), 0, error.start) + 1}", None, "not UTF-8; save the file as UTF-8")
        return
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    columns: list[str] = []
    line = 1
    try:
        columns = next(reader, [])
        if problem := _problem_of_header(columns, separator):
            yield Row(f"{name}:1", None, problem)
            return
        line = reader.line_num + 1
        for cells in reader:
            where, line = f"{name}:{line}", reader.line_num + 1
            if not cells:
                yield Row(where, None, "the line is empty; remove it")
            elif len(cells) != len(columns):
                yield Row(where, None, f"the line has {len(cells)} cells and the header names {len(columns)} columns; put a cell with {separator!r} in quotes")
            else:
                yield Row(where, dict(zip(columns, cells, strict=True)))
    except csv.Error as error:
        yield Row(f"{name}:{max(line, 1)}", None, f"not valid CSV: {error}")


def _problem_of_header(columns: list[str], separator: str) -> str:
    other = next((mark for mark in SEPARATORS if mark != separator and len(columns) == 1 and mark in columns[0]), None)
    if other is not None:
        return f"the header is one column with {other!r} in it; separate columns by {separator!r}, or by tabs in a file with the ending .tsv"
    if any(not column.strip() for column in columns):
        return "a column has no name; the first line must name every column"
    repeated = next((column for column in columns if columns.count(column) > 1), None)
    return f"column '{repeated}' is named twice; rename one" if repeated is not None else ""
