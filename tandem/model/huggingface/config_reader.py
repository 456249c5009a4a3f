"""Typed values of a ``config.json``. Imports no torch."""

import reprlib
import sys
from typing import Any

from tandem.types import UserError

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 100


class ConfigReader:
    """Reads typed values of ``config``, the content of a ``config.json``. A ``null`` counts as missing; a missing key without a
    default raises ``UserError``, as does a value of another type. ``where`` names the file in errors."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def fail(self, key: str, value: Any, fix: str) -> UserError:
        """Returns the error for a ``value`` that is not accepted."""
        return UserError(f"'{self.where}' has {key} {_shown.repr(value)}; {fix}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise UserError(f"'{self.where}' has no {key}; a model needs it")
            return default
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a whole number of at least 1, of 63 bits."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(key, value, "it must be a whole number of at least 1")
        if value >= 2**63:
            raise self.fail(key, value, "it must be a whole number below 2^63")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0, and finite."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self.fail(key, value, "it must be a number above 0, and finite")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Returns true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, value, "it must be true or false")
        return value

    def only(self, key: str, supported: Any) -> None:
        """Raises ``UserError`` if ``key`` has a value other than ``supported`` (``None``: any value)."""
        value = self.config.get(key)
        if value is not None and value != supported:
            raise self.fail(key, value, "it is not supported" if supported is None else f"only {supported!r} is supported")
