"""Checks that several sections share."""

from tandem.types.errors import UserError

MOST_GIB = 2**30
"""Above every machine's memory, and small enough to be counted in bytes."""
MOST_SECONDS = 10**8
"""About three years. The clocks of sockets, polls and process groups cannot count to every number that a recipe can hold."""


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
