"""The options of ``EngineArgs`` on the command line, one for each field, for the commands that start an engine."""

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from tandem.cli.number_types import token_count
from tandem.config.describe import field_descriptions
from tandem.config.engine import EngineArgs, SpeculativeConfig
from tandem.config.implementation import OWN, Implementation, ImplementationName
from tandem.config.load import build
from tandem.config.pooling import PoolerConfig
from tandem.config.vllm_names import DTYPES, with_method
from tandem.types import UserError
from tandem.types.input_file import read_input

SHORT = {"tensor_parallel_size": ("-tp",), "quantization": ("-q",)}
"""vLLM's short flags."""
MOST_TEMPLATE_BYTES = 2**20


def add_engine_options(parser: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()) -> None:
    """Adds an option for each field of ``EngineArgs`` except ``model`` and those in ``leave_out``. ``--field-name`` sets a value,
    ``--no-field-name`` turns a switch off."""
    group = parser.add_argument_group("engine")
    hints, descriptions = typing.get_type_hints(EngineArgs), field_descriptions(EngineArgs)
    for field in dataclasses.fields(EngineArgs):
        if field.name in ("model", *leave_out):
            continue
        text = descriptions.get(field.name, "").replace("`", "").replace("%", "%%")
        flags = ["--" + field.name.replace("_", "-"), *SHORT.get(field.name, ())]
        kind = _kind(field.name, hints[field.name])
        group.add_argument(*flags, default=argparse.SUPPRESS, help=f"{text}{_default(field.default)}", **kind)
    group.add_argument("--config", metavar="FILE", help="a YAML file with the name of a flag and its value in each line")


def add_implementation(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say who computes the model, for commands that have no other option of ``EngineArgs``."""
    parser.add_argument(
        "--model-impl", choices=typing.get_args(ImplementationName), metavar="NAME",
        help="who computes the model: tandem (also auto), or transformers, for any other decoder that it has (default: as the recipe says, or auto)",
    )  # fmt: skip
    parser.add_argument("--trust-remote-code", action="store_true", help="with transformers: run the code in the model's folder if its class is there")


def implementation(options: argparse.Namespace, recipe: Implementation = OWN) -> Implementation:
    """Returns who computes the model: as the options of ``add_implementation`` say, or the ``recipe``. Raises ``UserError``."""
    name = options.model_impl or recipe.name
    if options.trust_remote_code and name != "transformers":
        raise UserError(f"--trust-remote-code is given and --model-impl is '{name}', which runs no code of a model's folder; set it to transformers")
    return Implementation(name, name == "transformers" and (options.trust_remote_code or recipe.trust_remote_code))


def engine_args(options: argparse.Namespace, **decided: Any) -> EngineArgs:
    """Returns the engine's options: those given on the command line, and those set by the command, ``decided``. Raises ``UserError``."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(EngineArgs) if hasattr(options, field.name)}
    named = {**given, **decided}
    if isinstance(draft := named.get("speculative_config"), Mapping):
        named["speculative_config"] = with_method(draft)
    return build(EngineArgs, named, "engine")


def _kind(name: str, hint: Any) -> dict[str, Any]:
    """Returns the keyword arguments of ``add_argument`` for the field ``name`` of type ``hint``."""
    if name == "dtype":
        return {"type": lambda given: DTYPES.get(given, given), "choices": typing.get_args(hint)}
    if name in ("max_model_len", "max_num_batched_tokens"):
        return {"type": token_count, "metavar": "N"}
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    inner = next(part for part in typing.get_args(hint) if part is not type(None)) if is_union else hint
    if inner is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(inner) is Literal:
        return {"choices": typing.get_args(inner)}
    if inner in (SpeculativeConfig, PoolerConfig) or typing.get_origin(inner) is Mapping:
        return {"type": partial(json_object, "--" + name.replace("_", "-")), "metavar": "JSON"}
    return {"type": inner, "metavar": {int: "N", float: "X", str: "TEXT"}[inner]}


def _default(value: object) -> str:
    return "" if value is None or value == "" or isinstance(value, bool) else f" (default: {value})"


def local_model(name: str) -> str:
    """Returns the folder of a model, which is downloaded if it is on the Hub; an address in object storage as it is. Raises ``UserError``."""
    from tandem.model.huggingface.hub import hub_model
    from tandem.model.model_source import find_model
    from tandem.model.weight_store import is_remote

    return name if hub_model(name) is None and is_remote(name) else str(find_model(name))


def template_text(given: str) -> str:
    """Returns a chat template: the content of the file ``given``, or ``given`` itself if it is the text of a template, as in vLLM. Raises
    ``UserError``."""
    try:
        return read_input(given, MOST_TEMPLATE_BYTES, "a chat template is short").decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if any(mark in given for mark in "{}\n"):
            return given
        raise UserError(f"--chat-template '{given}' cannot be read: {error}") from None


def json_object(flag: str, given: str) -> dict[str, Any]:
    """Returns the object in the JSON text that the option ``flag`` is given. Raises ``UserError``."""
    try:
        value = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{flag} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{flag} is {given}; it must be a JSON object")
    return value
