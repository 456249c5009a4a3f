"""What a request asks for, checked."""

import math
from typing import cast

from starlette.requests import Request

from tandem.report.columns import Axis
from tandem.types import UserError

_LONGEST = 1000
_LARGEST = 2**53


def text(request: Request, name: str, default: str | None = None) -> str:
    """Returns a parameter. Raises ``UserError`` where it is missing and has no ``default``, or is too long."""
    value = request.query_params.get(name, default)
    if value is None:
        raise UserError(f"the parameter '{name}' is missing")
    if len(value) > _LONGEST:
        raise UserError(f"the parameter '{name}' has {len(value)} characters; at most {_LONGEST} are allowed")
    return value


def number(request: Request, name: str) -> float | None:
    """Returns a parameter that is a finite number, ``None`` without it. Raises ``UserError``."""
    value = request.query_params.get(name)
    if value is None or value == "":
        return None
    try:
        found = float(value[:50])
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"the parameter '{name}' is '{value[:50]}', which is no finite number")
    return found


def integer(request: Request, name: str) -> int | None:
    """Returns a parameter that is a whole number of at least 0, ``None`` without it. Raises ``UserError``."""
    found = number(request, name)
    if found is None:
        return None
    if found != int(found) or not 0 <= found <= _LARGEST:
        raise UserError(f"the parameter '{name}' is {found:g}, which is no whole number of at least 0")
    return int(found)


def axis(request: Request) -> Axis:
    """Returns the horizontal axis. Raises ``UserError``."""
    value = text(request, "axis", "step")
    if value not in ("step", "time"):
        raise UserError(f"the parameter 'axis' is '{value[:50]}'; it is 'step' or 'time'")
    return cast(Axis, value)
