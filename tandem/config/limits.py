"""Checks that several sections share."""

from tandem.types.errors import UserError


def check_at_least_one(section: str, values: object, *names: str) -> None:
    """Raises ``UserError`` for the first of the fields ``names`` of ``values``, which is ``section`` of a recipe, that is below 1."""
    for name in names:
        if getattr(values, name) < 1:
            raise UserError(f"'{section}.{name}' is {getattr(values, name)}; it must be at least 1")
