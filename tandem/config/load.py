"""Loads a recipe file and ``--key.sub=value`` overrides into a frozen, typed, validated configuration.

Every mistake is one ``UserError`` that names the key, the value and the fix; for unknown keys it suggests the nearest known one.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from tandem.config.bundled import how_to_name
from tandem.config.run_paths import without_run_paths
from tandem.config.yaml_text import parse_yaml
from tandem.types.errors import UserError
from tandem.types.input_file import read_input

Section = TypeVar("Section")

MOST_RECIPE_BYTES = 2**18
"""A hundred times the longest recipe; parsing as much takes about a second."""
LONGEST_SHOWN = 200
"""Characters of a value in a message."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Returns the mapping in the YAML file ``path``. Raises ``UserError`` with file and line if it is not a valid mapping."""
    try:
        text = read_input(path, MOST_RECIPE_BYTES, "a recipe is a short YAML file, for example recipes/sort.yaml").decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"recipe '{path}' does not exist; {how_to_name(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe '{path}' cannot be read: {error}") from None
    try:
        data = parse_yaml(text, str(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections, this is {_describe(data)}")
    return without_run_paths(data, Path(path).parent)


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a copy of ``data`` with each ``key.sub=value`` set (leading dashes allowed, value in YAML). Raises ``UserError``."""
    result: dict[str, Any] = _deep_copy(data)
    for override in overrides:
        name, equals, text = override.lstrip("-").partition("=")
        if not equals or not name:
            raise UserError(f"override '{override}' is not of the form --key.sub=value")
        try:
            value = _as_written(parse_yaml(text, f"override '{name}'") if text else "", text)
        except yaml.YAMLError:
            value = text
        target = result
        *parents, last = name.split(".")
        for parent in parents:
            if target.get(parent) is None:  # A saved recipe has the sections that it does not use, without a value.
                target[parent] = {}
            child = target[parent]
            if not isinstance(child, dict):
                raise UserError(f"override '{override}': '{parent}' is {_describe(child)}, not a section")
            target = child
        target[last] = value
    return result


class _WrittenMapping(dict[str, Any]):
    """The mapping that an override's ``text`` is in YAML: ``{prompt}`` is one, and for a key that is a text it is that text."""

    text = ""


class _WrittenList(list[Any]):
    """The list that an override's ``text`` is in YAML."""

    text = ""


def _as_written(value: Any, text: str) -> Any:
    if not isinstance(value, dict | list):
        return value
    written = _WrittenMapping(value) if isinstance(value, dict) else _WrittenList(value)
    written.text = text
    return written


def build(section: type[Section], data: Mapping[str, Any], where: str = "") -> Section:
    """Returns ``data`` as the dataclass ``section``: types are checked, unknown keys refused, nested sections built, and ``check()`` called
    if a section has one.

    ``where`` is the dotted path for messages. Keys listed in the section's ``refused_keys``, dotted, with the reason for each, are refused
    with that reason even if the value is the default."""
    for key, reason in refused_keys(section).items():
        if _contains(data, key):
            raise UserError(f"'{_join(where, key)}' cannot be set: {reason}; remove it")
    hints = typing.get_type_hints(section)
    fields = {f.name: f for f in dataclasses.fields(section) if f.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"did you mean '{_join(where, near[0])}'?" if near else f"known here: {', '.join(sorted(fields))}"
            raise UserError(f"unknown key '{_join(where, str(key))}'; {hint}")
    values = {key: _convert(hints[key], value, _join(where, key)) for key, value in data.items()}
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"key '{_join(where, name)}' is missing; it has no default")
    built = section(**values)
    check = getattr(built, "check", None)
    if check is not None:
        check()
    return built


def to_mapping(section: Any) -> Any:
    """Returns a configuration as plain data, as it is saved with a run; ``build`` reads it back."""
    if dataclasses.is_dataclass(section) and not isinstance(section, type):
        plain = {f.name: to_mapping(getattr(section, f.name)) for f in dataclasses.fields(section) if f.init}
        for key in refused_keys(type(section)):
            _remove(plain, key)
        return plain
    if isinstance(section, Mapping):
        return {key: to_mapping(value) for key, value in section.items()}
    if isinstance(section, list | tuple):
        return [to_mapping(value) for value in section]
    return section


def refused_keys(section: type) -> Mapping[str, str]:
    """Returns the keys, dotted below ``section``, that a nested section knows and ``section`` does not read, with the reason for each."""
    keys: Mapping[str, str] = getattr(section, "refused_keys", {})
    return keys


def _contains(data: Any, dotted: str) -> bool:
    for key in dotted.split("."):
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return True


def _remove(data: dict[str, Any], dotted: str) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        data = data.get(key) or {}
    data.pop(last, None)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _convert_any(value, where)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is Literal:
        # True is equal to 1 in Python, and no choice of numbers.
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            near = difflib.get_close_matches(_describe(value)[:100], [str(a) for a in arguments], n=1, cutoff=0.5)
            hint_text = f"did you mean '{near[0]}'?" if near else ""
            choices = ", ".join(str(a) for a in arguments)
            raise UserError(f"'{where}' is {_describe(value)}; it must be one of {choices}. {hint_text}".rstrip())
        return value
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise UserError(f"'{where}' is {_describe(value)}; it must be a list")
        if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
            if len(value) != len(arguments):
                raise UserError(f"'{where}' has {len(value)} entries; it must have {len(arguments)}")
            return tuple(_convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(arguments, value, strict=True)))
        return origin(_convert(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise UserError(f"'{where}' is {_describe(value)}; it must be a mapping")
        return _convert_keys(value, arguments[1], where)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
        if not isinstance(value, Mapping):
            raise UserError(f"'{where}' is {_describe(value)}; it must be a section of key: value lines")
        return build(hint, value, where)  # type: ignore[arg-type]
    return _convert_plain(hint, value, where)


def _convert_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    errors = []
    for argument in (a for a in arguments if a is not type(None)):
        try:
            return _convert(argument, value, where)
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _convert_keys(value: Mapping[Any, Any], hint: Any, where: str) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str | int | float):
            raise UserError(f"'{where}' has the key {_describe(key)}; a key must be a text or a number")
    return {_text(str(k), where): _convert(hint, v, _join(where, str(k))) for k, v in value.items()}


def _convert_any(value: Any, where: str) -> Any:
    """Returns ``value``, which a recipe passes on to a function, if it can be saved with the run."""
    if isinstance(value, Mapping):
        return _convert_keys(value, Any, where)
    if isinstance(value, list | tuple):
        return [_convert_any(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if value is None or isinstance(value, bool | float):
        return value
    for kind in (int, str):
        if isinstance(value, kind):
            return _convert_plain(kind, value, where)
    raise UserError(f"'{where}' is {_describe(value)}; it must be a text, a number, a list or a mapping (a date needs quotation marks)")


def _convert_plain(hint: Any, value: Any, where: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:
            raise UserError(f"'{where}' is {_describe(value)}; it must be a whole number below 2^63")
        return value
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:  # YAML 1.1 reads 1e-3 as a string
            number = float(value)
        except ValueError:
            number = math.nan
        except OverflowError:
            number = math.inf
        if math.isnan(number):
            raise UserError(f"'{where}' is {_describe(value)}; it must be a number")
        if math.isinf(number):
            raise UserError(f"'{where}' is {_describe(value)}; it must be a number, and finite")
        return number
    if hint is str and isinstance(value, str):
        return _text(value, where)
    if hint is str and isinstance(value, _WrittenMapping | _WrittenList):
        return _text(value.text, where)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return _describe(value)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    raise UserError(f"'{where}' is {_describe(value)}; it must be {names.get(hint, hint)}")


def _text(value: str, where: str) -> str:
    if "\0" in value:
        raise UserError(f"'{where}' is {_describe(value)}, which has a null character; take it out")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"'{where}' is {_describe(value)}, whose character {error.start + 1} is half of a surrogate pair; take it out") from None
    return value


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _describe(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of about {value.bit_length() * math.log10(2):.0f} digits"
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text):,} characters)"


def _deep_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _deep_copy(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_deep_copy(v) for v in value]
    return value
