"""Refuses keys that another key turns off.

Limits (deadlines, restarts, memory) are never refused: one that is not reached has no effect either.
"""

import dataclasses

from tandem.types.errors import UserError


def refuse_unread(where: str, section: object, reason: str, *names: str, fix: str = "") -> None:
    """Raises ``UserError`` for the first of the fields ``names`` of the dataclass ``section``, at ``where`` in the recipe, whose value is not
    the default. ``reason``: why it is not read. ``fix``: what to set instead, so that it is read."""
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        if field.name in names and value != field.default:
            plain = str(value).lower() if isinstance(value, bool) else value if isinstance(value, int | float) else f"'{value}'"
            remedy = f"{fix}, or remove the key" if fix else "remove the key"
            # A section is not written as its keys are.
            said = "given" if dataclasses.is_dataclass(value) else plain
            raise UserError(f"'{where}.{field.name}' is {said}, which is not read: {reason}; {remedy}")
