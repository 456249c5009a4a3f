"""Chats whose last message the model continues: a mark follows its content while the template is applied, and the text is cut at the
mark."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.types import UserError

_MARK = "\x02the end of the last message\x03 "
"""A template that trims contents removes the last character."""


def mark_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns ``messages`` with the mark after the last one's content. Raises ``UserError`` if that content is not a string."""
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise UserError("continue_final_message needs a last message whose content is a text")
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _MARK}]


def cut_at_mark(text: str) -> str:
    """The template's ``text`` up to the mark. Raises ``UserError`` where the template left the message out."""
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark:
        raise UserError("the chat template does not show the last message, so it cannot be continued")
    return before if after.startswith(" ") else before.rstrip()
