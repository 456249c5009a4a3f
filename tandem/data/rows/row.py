"""A row of a data file, before anything is known of its keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandem.types import UserError


class Row(NamedTuple):
    """``values``: JSON values by key, ``None`` if the row cannot be read; ``problem`` then says why in one line. ``where``: file and line, or file and
    number of the row, for messages."""

    where: str
    values: Mapping[str, Any] | None
    problem: str = ""


@dataclass(frozen=True)
class Rows:
    """All rows of a file, a folder or a dataset. ``digest``: of the file's bytes, or of the rows where there is no single file. ``kind``: its format, for
    messages. ``is_file``: the digest is that of the file ``name``."""

    name: str
    kind: str
    rows: tuple[Row, ...]
    digest: str
    is_file: bool = True

    def checked(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Returns (where, values) of every row. Raises ``UserError`` for the first that cannot be read."""
        checked = []
        for row in self.rows:
            if row.values is None:
                raise UserError(f"{row.where}: {row.problem}")
            checked.append((row.where, row.values))
        return checked


def kind_of(value: Any) -> str:
    """Returns what a JSON value is, for messages."""
    if value is None:
        return "null"
    names: dict[type, str] = {bool: "true or false", str: "a text", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def keys_of(values: Mapping[str, Any]) -> str:
    """Returns the keys of a row, for messages."""
    return ", ".join(map(repr, values)) or "no keys"


_MISSING = object()


def value_at(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Returns the value under ``key``, which may be dotted: ``reward_model.ground_truth`` is the value under ``ground_truth`` of the object under
    ``reward_model``. A key that contains the dots itself comes first."""
    if key in values:
        return values[key]
    value: Any = values
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is _MISSING:
            return default
    return value


def has_key(values: Mapping[str, Any], key: str) -> bool:
    """Returns whether ``value_at`` finds a value under ``key``."""
    return value_at(values, key, _MISSING) is not _MISSING
