"""Checks that several sections share."""

from tandem.types.errors import UserError

MOST_GIB = 2**30
"""Above every machine's memory, and small enough to be counted in bytes."""
MOST_SECONDS = 2_000_000
"""23 days. The system's polls count milliseconds with 31 bits, 24.8 days, to which processes add times to end each other."""

MOST_FLOAT32 = 3.4e38
"""Kernels compute in float32; torch raises for a larger number instead of rounding it to infinity."""


def check_float32(section: str, values: object, *names: str) -> None:
    """Raises ``UserError`` for the first of the fields ``names`` of ``values`` that is more than float32 can hold; an empty one is not checked."""
    for name in names:
        value = getattr(values, name)
        if value is not None and abs(value) > MOST_FLOAT32:
            raise UserError(f"'{section}.{name}' is {value:g}; it must be at most {MOST_FLOAT32:g}, the range of float32")


def check_at_least_one(section: str, values: object, *names: str) -> None:
    """Raises ``UserError`` for the first of the fields ``names`` of ``values``, which is ``section`` of a recipe, that is below 1."""
    for name in names:
        if getattr(values, name) < 1:
            raise UserError(f"'{section}.{name}' is {getattr(values, name)}; it must be at least 1")


def check_seconds(section: str, values: object, *names: str) -> None:
    """Raises ``UserError`` for the first of the fields ``names`` of ``values`` that is not a number of seconds that a process can wait."""
    for name in names:
        if not 0 < getattr(values, name) <= MOST_SECONDS:
            raise UserError(f"'{section}.{name}' is {getattr(values, name)}; it must be above 0 seconds, at most {MOST_SECONDS}")
