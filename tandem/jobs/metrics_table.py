"""The metrics of a run as a table: a row for each step, from ``metrics.jsonl``."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, overload

from tandem.runtime.records.metrics import read_rows
from tandem.types import UserError

Value = float | int | str | bool | None
Row = dict[str, Value]
SHOWN = ("step", "reward/mean", "train/loss", "accuracy", "kl", "actor/grad_norm", "response_length/mean", "perf/tokens_per_s")
SHOWN_ROWS = 5


class MetricsTable(Sequence[Row]):
    """The rows of a run, in the order of its steps. ``table[-1]`` is a row, ``table["reward/mean"]`` a column, ``to_pandas()`` a data frame."""

    def __init__(self, path: Path) -> None:
        """Reads the file ``path``. Raises ``UserError`` if it cannot be read."""
        self._rows: list[Row] = list(read_rows(path))

    @property
    def columns(self) -> list[str]:
        """The names of all metrics, in the order in which they first occur."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @overload
    def __getitem__(self, key: int) -> Row: ...

    @overload
    def __getitem__(self, key: slice) -> list[Row]: ...

    @overload
    def __getitem__(self, key: str) -> list[Value]: ...

    def __getitem__(self, key: int | slice | str) -> Row | list[Row] | list[Value]:
        """Returns a row, several, or the values of a metric, ``None`` for steps without it. Raises ``KeyError`` for an unknown metric."""
        if not isinstance(key, str):
            return self._rows[key]
        if key not in self.columns:
            raise KeyError(f"no metric {key!r}; there are {', '.join(self.columns)}")
        return [row.get(key) for row in self._rows]

    def to_pandas(self) -> Any:
        """Returns a ``pandas.DataFrame`` with the step as its index. Raises ``UserError`` without pandas."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise UserError("to_pandas needs pandas, which is not installed; pip install pandas, or iterate over the rows") from None
        return pandas.DataFrame(self._rows, columns=self.columns).set_index("step")

    def __repr__(self) -> str:
        names = [name for name in SHOWN if name in self.columns]
        shown = [[_text(row.get(name)) for name in names] for row in self._rows[-SHOWN_ROWS:]]
        widths = [max(map(len, column)) for column in zip(names, *shown, strict=True)]
        lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in (names, *shown)]
        hidden = len(self._rows) - len(shown)
        return "\n".join([*lines, f"{len(self._rows)} steps, {len(self.columns)} metrics{f', the last {len(shown)} shown' if hidden else ''}"])


def _text(value: Value) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
