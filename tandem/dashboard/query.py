"""What a request asks for, checked."""

import math
from collections.abc import Mapping, Sequence
from typing import cast

from tandem.report.columns import Axis
from tandem.types import UserError

Query = Mapping[str, Sequence[str]]
"""The parameters of a request, each with its values."""
_LONGEST = 1000
_LARGEST = 2**53


def text(query: Query, name: str, default: str | None = None) -> str:
    """Returns a parameter. Raises ``UserError`` where it is missing and has no ``default``, or is too long."""
    value = query.get(name, [default])[-1]
    if value is None:
        raise UserError(f"the parameter '{name}' is missing")
    if len(value) > _LONGEST:
        raise UserError(f"the parameter '{name}' has {len(value)} characters; at most {_LONGEST} are allowed")
    return value


def number(query: Query, name: str) -> float | None:
    """Returns a parameter that is a finite number, ``None`` without it. Raises ``UserError``."""
    value = query.get(name, [None])[-1]
    if value is None or value == "":
        return None
    try:
        found = float(value[:50])
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"the parameter '{name}' is '{value[:50]}', which is no finite number")
    return found


def integer(query: Query, name: str) -> int | None:
    """Returns a parameter that is a whole number of at least 0, ``None`` without it. Raises ``UserError``."""
    value = number(query, name)
    if value is None:
        return None
    if value != int(value) or not 0 <= value <= _LARGEST:
        raise UserError(f"the parameter '{name}' is {value:g}, which is no whole number of at least 0")
    return int(value)


def axis(query: Query) -> Axis:
    """Returns the horizontal axis. Raises ``UserError``."""
    value = text(query, "axis", "step")
    if value not in ("step", "time"):
        raise UserError(f"the parameter 'axis' is '{value[:50]}'; it is 'step' or 'time'")
    return cast(Axis, value)
