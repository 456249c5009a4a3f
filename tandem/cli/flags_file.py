"""The flags of ``tandem serve`` and ``tandem generate`` as vLLM takes them: with underscores too, and from a YAML file."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.config.yaml_text import read_mapping
from tandem.types import UserError

MOST_BYTES = 2**16
"""Of a file of flags."""
MODEL_KEYS = ("model", "model-tag")


def expanded(words: Sequence[str], command: argparse.ArgumentParser) -> list[str]:
    """Returns the arguments of ``command`` with dashes in the names of flags, and those of ``--config FILE`` before the others, which replace them.

    The file has a flag's name and its value in each line; ``model`` is the first argument unless that is given. Raises ``UserError``."""
    plain = [_with_dashes(word) for word in words]
    at = next((i for i, word in enumerate(plain) if word.partition("=")[0] == "--config"), None)
    if at is None:
        return plain
    _, equals, path = plain[at].partition("=")
    if not equals:
        path = plain[at + 1] if at + 1 < len(plain) else ""
    if not path:
        raise UserError("--config names no file; give a YAML file of flags")
    own = [*plain[:at], *plain[at + (1 if equals else 2) :]]
    content = _read(path)
    model = [str(value) for key, value in content.items() if _flag(key)[2:] in MODEL_KEYS]
    flags = flag_words(path, {key: value for key, value in content.items() if _flag(key)[2:] not in MODEL_KEYS}, command)
    if own and not own[0].startswith("-"):
        model, own = own[:1], own[1:]
    return [*model, *flags, *own]


def flag_words(where: str, flags: Mapping[Any, Any], command: argparse.ArgumentParser) -> list[str]:
    """Returns the arguments of ``command`` that are ``flags`` with their values. ``where``: they were read, for messages. Raises ``UserError``."""
    return [word for key, value in flags.items() for word in _words(where, key, value, command)]


def _words(path: str, key: Any, value: Any, command: argparse.ArgumentParser) -> list[str]:
    """Returns the words of one line of the file."""
    flag, no_flag = _flag(key), f"--no-{_flag(key)[2:]}"
    # argparse has no public way to list flags.
    actions: Mapping[str, argparse.Action] = command._option_string_actions
    if value is None:
        return []
    if isinstance(value, bool):
        if flag in actions and actions[flag].nargs != 0:
            raise UserError(f"{path}: '{key}' is {str(value).lower()}, and {flag} needs a value")
        return [flag] if value else [no_flag] if no_flag in actions else []
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def _flag(key: Any) -> str:
    return f"--{str(key).replace('_', '-')}"


def _with_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _read(path: str) -> dict[Any, Any]:
    return read_mapping(
        path, f"--config '{path}'", MOST_BYTES, why_short="a file of flags is short", missing="name a YAML file of flags",
        wrong="has no flags; write a line such as 'max-model-len: 4096' for each",
    )  # fmt: skip
