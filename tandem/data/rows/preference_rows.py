"""Preference pairs in rows: TRL's ``prompt``, ``chosen`` and ``rejected``, of texts or of messages, the prompt also implicit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.data.rows.messages import BadMessages, Message, is_messages, read_messages, read_tools
from tandem.data.rows.row import keys_of, kind_of
from tandem.types import UserError


@dataclass(frozen=True, slots=True)
class Preference:
    """A pair of answers to one prompt: texts, or messages that begin after the prompt's. ``tools``: of messages, as JSON schemas."""

    prompt: str | tuple[Message, ...]
    chosen: str | tuple[Message, ...]
    rejected: str | tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def read_preference(where: str, values: Mapping[str, Any]) -> Preference:
    """Returns the pair in a row. An implicit prompt is what ``chosen`` and ``rejected`` begin with: of messages those that are equal, of texts the
    characters. Raises ``UserError`` with ``where``."""
    for key in ("chosen", "rejected"):
        if key not in values:
            raise UserError(f"{where}: key '{key}' is missing; the line has {keys_of(values)}")
    try:
        sides = [_side(values[key], key) for key in ("prompt", "chosen", "rejected") if values.get(key) is not None]
        tools = read_tools(values.get("tools"))
    except BadMessages as error:
        raise UserError(f"{where}: {error}") from None
    if len({type(side) for side in sides}) > 1:
        raise UserError(f"{where}: 'prompt', 'chosen' and 'rejected' are partly texts and partly messages; use one form")
    chosen, rejected = sides[-2:]
    if chosen == rejected:
        raise UserError(f"{where}: 'chosen' and 'rejected' are the same, so there is no preference; remove the line")
    if len(sides) == 3:
        return Preference(sides[0], chosen, rejected, tools)
    count = _common(chosen, rejected)
    if count == 0 or count in (len(chosen), len(rejected)):
        raise UserError(f"{where}: 'chosen' and 'rejected' do not begin with the same prompt and go on after it; add the key 'prompt'")
    return Preference(chosen[:count], chosen[count:], rejected[count:], tools)


def _side(value: Any, key: str) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            raise BadMessages(f"'{key}' is an empty text")
        return value
    if not is_messages(value):
        raise BadMessages(f"'{key}' is {kind_of(value)}; it must be a text or a list of messages")
    return read_messages(value, key)


def _common(chosen: str | tuple[Message, ...], rejected: str | tuple[Message, ...]) -> int:
    count = 0
    for ours, theirs in zip(chosen, rejected, strict=False):
        if ours != theirs:
            break
        count += 1
    # As TRL does: the space before the answer belongs to the answer.
    return count - 1 if isinstance(chosen, str) and count and chosen[count - 1] == " " else count
