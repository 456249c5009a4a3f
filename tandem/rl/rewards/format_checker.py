"""Checks whether a completion has the required format."""

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tandem.config.rewards import SCRIPTS, FormatCheckerConfig
from tandem.rl.rewards.judgement import Item, Judgement, describe, number
from tandem.types import UserError


def format_checker(config: FormatCheckerConfig) -> Callable[[Item], Judgement]:
    """Returns the judge function: 1.0 if the completion has the format, else 0.0; of ``scripts`` a share. Raises ``UserError`` for a JSON schema that is not
    valid or without the package that checks it."""
    if config.scripts:
        return lambda item: _share(share_of_scripts(item.completion, config.scripts))
    if config.json_schema:
        return _schema_checker(config)
    pattern = re.compile(config.pattern, re.DOTALL)

    def judge(item: Item) -> Judgement:
        text = item.completion.strip()
        if config.tags:
            right = has_tags(text, config.tags, whole=config.match == "full")
        else:
            right = bool(pattern.fullmatch(text) if config.match == "full" else pattern.search(text))
        return number(float(right), correct=right)

    return judge


def _share(value: float) -> Judgement:
    return number(value, correct=value == 1)


_OPENING = re.compile(r"[{\[]")
MOST_FAILED = 1000
"""Brackets of a text that begin no JSON, after which it is no longer searched: each may be as deep as the decoder goes."""


def has_tags(text: str, tags: Sequence[str], *, whole: bool) -> bool:
    """Returns whether each ``<tag>...</tag>`` occurs in ``text`` exactly once, in the order of ``tags``, none inside another and, with
    ``whole``, with only white space around and between them."""
    at = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        start, end = text.find(opening, at), text.find(closing, at)
        if start < 0 or end < start + len(opening) or (whole and text[at:start].strip()):
            return False
        at = end + len(closing)
    return not (whole and text[at:].strip())


# -- JSON --------------------------------------------------------------------------------------------------------------


def _schema_checker(config: FormatCheckerConfig) -> Callable[[Item], Judgement]:
    try:
        from jsonschema import SchemaError, validators  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise UserError("'format.json_schema' needs a package; install it with: pip install 'tandem-rl[json-schema]'") from None
    schema = dict(config.json_schema)
    kind = validators.validator_for(schema, validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise UserError(f"'format.json_schema' of a reward function is not a valid JSON schema: {describe(error)}") from None
    validator = kind(schema)

    def judge(item: Item) -> Judgement:
        text = item.completion.strip()
        found, value = whole_json(text) if config.match == "full" else last_json(text)
        right = found and bool(validator.is_valid(value))
        return number(float(right), correct=right)

    return judge


def whole_json(text: str) -> tuple[bool, Any]:
    """Returns whether ``text`` is JSON, without Python's ``NaN`` and ``Infinity``, and its value."""
    try:
        return True, _DECODER.decode(text)
    except (ValueError, RecursionError):
        return False, None


def last_json(text: str) -> tuple[bool, Any]:
    """Returns whether ``text`` contains a JSON object or array, and the value of the last one that is in no other."""
    at, found, value, failed = 0, False, None, 0
    while failed < MOST_FAILED and (start := _OPENING.search(text, at)):
        try:
            value, at = _DECODER.raw_decode(text, start.start())
            found = True
        except (ValueError, RecursionError):
            at, failed = start.end(), failed + 1
    return found, value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


# -- scripts -----------------------------------------------------------------------------------------------------------


def share_of_scripts(text: str, scripts: Sequence[str]) -> float:
    """Returns the share of the letters of ``text`` that belong to one of ``scripts``; 1 without letters."""
    letters = [character for character in text if character.isalpha()]
    beginnings = tuple(SCRIPTS[script] for script in scripts)
    return sum(_name(letter).startswith(beginnings) for letter in letters) / len(letters) if letters else 1.0


@cache
def _name(letter: str) -> str:
    return unicodedata.name(letter, "").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
