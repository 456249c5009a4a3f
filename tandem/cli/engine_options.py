"""The options of ``EngineArgs`` on the command line, one for each field, for the commands that start an engine."""

import argparse
import dataclasses
import json
import types
import typing
from typing import Any, Literal

from tandem.config.describe import field_descriptions
from tandem.config.engine import EngineArgs, SpeculativeConfig
from tandem.config.load import build
from tandem.types import UserError


def add_engine_options(parser: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()) -> None:
    """Adds an option for each field of ``EngineArgs`` except ``model`` and those in ``leave_out``. ``--field-name`` sets a value,
    ``--no-field-name`` turns a switch off."""
    group = parser.add_argument_group("engine")
    hints, descriptions = typing.get_type_hints(EngineArgs), field_descriptions(EngineArgs)
    for field in dataclasses.fields(EngineArgs):
        if field.name in ("model", *leave_out):
            continue
        text = descriptions.get(field.name, "").replace("`", "").replace("%", "%%")
        flag = "--" + field.name.replace("_", "-")
        group.add_argument(flag, default=argparse.SUPPRESS, help=f"{text}{_default(field.default)}", **_kind(hints[field.name]))


def engine_args(options: argparse.Namespace, **decided: Any) -> EngineArgs:
    """Returns the engine's options: those given on the command line, and those set by the command, ``decided``. Raises ``UserError``."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(EngineArgs) if hasattr(options, field.name)}
    return build(EngineArgs, {**given, **decided}, "engine")


def _kind(hint: Any) -> dict[str, Any]:
    """Returns the keyword arguments of ``add_argument`` for a value of type ``hint``."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    inner = next(part for part in typing.get_args(hint) if part is not type(None)) if is_union else hint
    if inner is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(inner) is Literal:
        return {"choices": typing.get_args(inner)}
    if inner is SpeculativeConfig:
        return {"type": _object, "metavar": "JSON"}
    return {"type": inner, "metavar": {int: "N", float: "X", str: "TEXT"}[inner]}


def _default(value: object) -> str:
    return "" if value is None or value == "" or isinstance(value, bool) else f" (default: {value})"


def _object(given: str) -> dict[str, Any]:
    try:
        value = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"--speculative-config is {given}; it must be a JSON object")
    return value
