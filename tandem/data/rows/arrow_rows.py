"""Rows of Parquet and Arrow files and of the tables of ``datasets``. Needs pyarrow, of the extra ``data``."""

import math
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from tandem.data.rows.row import Row
from tandem.types import UserError

NEEDS = "pip install 'tandem-rl[data]'"
BYTES_PER_BYTE = 8
"""Memory for each byte of a table, at least: the table and its Python values."""


def parquet_table(content: bytes, name: str, most_bytes: int) -> Any:
    """Returns the table of the Parquet file ``content``. Raises ``UserError`` without pyarrow, for a damaged file and for one that is larger than
    ``most_bytes`` when it is unpacked."""
    pyarrow = import_pyarrow(name)
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(content))
        groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
        check_size(sum(group.total_byte_size for group in groups), name, most_bytes)
        return file.read()
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise damaged(name, "Parquet", error) from None


def arrow_table(content: bytes, name: str, most_bytes: int) -> Any:
    """Returns the table of the Arrow file or stream ``content``, as ``datasets`` and Feather write them. Raises as ``parquet_table``."""
    pyarrow = import_pyarrow(name)
    check_size(len(content), name, most_bytes)
    try:
        buffer = pyarrow.BufferReader(content)
        opened = pyarrow.ipc.open_file(buffer) if content.startswith(b"ARROW1") else pyarrow.ipc.open_stream(buffer)
        table = opened.read_all()
        table.validate(full=True)
        return table
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise damaged(name, "Arrow", error) from None


def table_rows(table: Any, name: str) -> Iterator[Row]:
    """Yields the rows of an Arrow table as JSON values: a moment becomes text in ISO format, NaN becomes null, a decimal number a number or, where that
    would round it, a text."""
    number = 0
    for batch in table.to_batches(max_chunksize=4096):
        for values in batch.to_pylist():
            number += 1
            where = f"{name}, row {number}"
            try:
                yield Row(where, {key: _json_value(value, key) for key, value in values.items()})
            except ValueError as error:
                yield Row(where, None, str(error))


def import_pyarrow(name: str) -> Any:
    """Returns the module pyarrow. Raises ``UserError`` where it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"'{name}' needs pyarrow, which is not installed; {NEEDS}, or save the rows as JSON lines") from None
    return pyarrow


def damaged(name: str, kind: str, error: Exception) -> UserError:
    """Returns the error for a file that is not what its first bytes say."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"'{name}' is not a whole {kind} file: {reason}; write or download it again")


def check_size(size: int, name: str, most_bytes: int) -> None:
    """Raises ``UserError`` for a table of ``size`` bytes that does not fit in the memory."""
    if size * BYTES_PER_BYTE > most_bytes:
        raise UserError(
            f"'{name}' has {size:,} bytes of data, of which each needs {BYTES_PER_BYTE} bytes of memory, and this machine has {most_bytes:,}; "
            "split it, or use a machine with more memory: all of it is held"
        )


def _json_value(value: Any, key: str) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_json_value(each, key) for each in value]
    if isinstance(value, dict):
        return {str(inner): _json_value(each, f"{key}.{inner}") for inner, each in value.items()}
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value) if Decimal(str(float(value))) == value else str(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes):
        raise ValueError(f"column '{key}' holds bytes, such as an image, and prompts and columns are text; leave the column out")
    raise ValueError(f"column '{key}' has a value of type {type(value).__name__}, which is not a text, a number, a list or an object; leave the column out")

