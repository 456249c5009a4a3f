"""``{% generation %} ... {% endgeneration %}`` of chat templates: the text of the assistant, which is learned.

The tags are transformers' own (``apply_chat_template``, ``return_assistant_tokens_mask``)."""

from collections.abc import Callable
from typing import Any

NO_MARKS = ("", "")
MARKS = ("\ufdd0", "\ufdd1")
"""Noncharacters of Unicode, which are reserved for internal use and occur in no text."""


def generation_extension(marks: tuple[str, str]) -> Any:
    """Returns a jinja2 extension that writes ``marks`` around the text between the tags."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it without ClassVar

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return marks[0] + caller() + marks[1]

    return Generation


def take_out_marks(text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """``text`` without ``MARKS``, and the characters (start, stop) that stood between them."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for number, piece in enumerate(text.split(MARKS[0])):
        inside, closes, after = piece.partition(MARKS[1])
        if number and closes:
            spans.append((length, length + len(inside)))
        parts += [inside, after]
        length += len(inside) + len(after)
    return "".join(parts), tuple(spans)
