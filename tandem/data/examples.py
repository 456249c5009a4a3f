"""Examples: a prompt with its completion, or a conversation. One is a row for supervised fine-tuning, two are a preference pair."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.data.rows.messages import ASSISTANT, BadMessages, Message, as_text, is_messages, read_messages, read_tools
from tandem.data.rows.preference_rows import read_preference
from tandem.types import UserError


class BrokenExample(Exception):
    """Raised for an example that cannot be trained on; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example: ``prompt`` and ``completion``, or ``messages`` with ``role`` and ``content``, at least one of them the assistant's,
    which may have ``tool_calls`` instead of content. ``tools``: the tools that the assistant can call, as JSON schemas. ``answer_from``: the first
    message of the answer, from which on everything is learned (``None``: every turn of the assistant is). ``margin``: of a preference pair, by which the
    chosen example is better."""

    prompt: str = ""
    completion: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    answer_from: int | None = None
    margin: float = 0.0

    @property
    def text(self) -> str:
        """The whole text of the example."""
        return "\n".join(message["content"] for message in self.messages if message.get("content")) if self.messages else self.prompt + self.completion

    @property
    def asked(self) -> str:
        """The prompt before the first learned token. It decides the split of an example, so that no question is both trained on and held
        out."""
        if not self.messages:
            return self.prompt
        first = self.answer_from
        if first is None:
            first = next(i for i, message in enumerate(self.messages) if message["role"] == ASSISTANT)
        return as_text(self.messages[:first])


def read_example(row: Any, prompt_key: str, completion_key: str) -> Example:
    """Returns the example in a JSON object: texts, or messages as in TRL's conversational form. Raises ``BrokenExample``."""
    if not isinstance(row, dict):
        raise BrokenExample("it is not a JSON object")
    try:
        if "messages" in row:
            if completion_key in row:
                raise BrokenExample(f"there are both 'messages' and '{completion_key}'; an example must be one of the two")
            return Example(messages=_learned(read_messages(row["messages"], "messages")), tools=read_tools(row.get("tools")))
        if is_messages(row.get(prompt_key)) and is_messages(row.get(completion_key)):
            prompt = read_messages(row[prompt_key], prompt_key)
            if any(message["role"] == ASSISTANT for message in prompt):
                raise BrokenExample(f"'{prompt_key}' has a message of the assistant, which would be learned too; leave it out, or name texts")
            return Example(messages=_learned((*prompt, *read_messages(row[completion_key], completion_key))), tools=read_tools(row.get("tools")))
    except BadMessages as error:
        raise BrokenExample(str(error)) from None
    for key in (prompt_key, completion_key):
        if not isinstance(row.get(key), str):
            raise BrokenExample(f"there is neither 'messages' nor a text under the key '{key}' (it has {', '.join(map(repr, row)) or 'no keys'})")
    if not row[completion_key]:
        raise BrokenExample(f"'{completion_key}' is empty, so there is nothing to learn")
    return Example(row[prompt_key], row[completion_key])


def read_pair(row: Any, margin_key: str = "") -> tuple[Example, Example]:
    """Returns the chosen and the rejected example of a preference pair (``preference_rows``), with its margin under ``margin_key`` if that is not empty.
    Raises ``BrokenExample``."""
    if not isinstance(row, dict):
        raise BrokenExample("it is not a JSON object")
    try:
        pair = read_preference("", row)
    except UserError as error:
        raise BrokenExample(str(error).removeprefix(": ")) from None
    margin = _margin(row, margin_key) if margin_key else 0.0
    if isinstance(pair.prompt, str):
        return Example(pair.prompt, str(pair.chosen), margin=margin), Example(pair.prompt, str(pair.rejected), margin=margin)
    answers = [answer for answer in (pair.chosen, pair.rejected) if not isinstance(answer, str)]
    messages = [(*pair.prompt, *_learned(answer)) for answer in answers]
    chosen, rejected = (Example(messages=each, tools=pair.tools, answer_from=len(pair.prompt), margin=margin) for each in messages)
    return chosen, rejected


def _margin(row: Mapping[str, Any], key: str) -> float:
    margin = row.get(key)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) < 1e30:
        raise BrokenExample(f"the margin under '{key}' is {'missing' if key not in row else reprlib.repr(margin)}; it must be a number")
    return float(margin)


def _learned(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    for number, message in enumerate(messages, start=1):
        if message["role"] == ASSISTANT and not message.get("content") and not message.get("tool_calls"):
            raise BrokenExample(f"message {number} is the assistant's and empty, so there is nothing to learn")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise BrokenExample("no message is the assistant's, so there is nothing to learn")
    return messages
