"""The values of a recipe under their dotted keys."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tandem.config.load import to_mapping


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every value in nested mappings. A list and an empty mapping are values."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{at}.{key}" if at else str(key))
    else:
        yield at, value


def default_values(section: Any) -> dict[str, Any]:
    """Returns the default of every key of the dataclass ``section``, nested as ``to_mapping`` returns its values. Keys without a default are
    left out."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value, default = getattr(section, field.name), _default(field)
        if dataclasses.is_dataclass(value) and type(default) is not type(value):
            found[field.name] = default_values(value)
        elif default is not dataclasses.MISSING:
            found[field.name] = to_mapping(default)
    return found


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
