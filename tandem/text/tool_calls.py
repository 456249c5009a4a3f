"""The tool calls in what a model wrote, in the formats of vLLM's tool parsers."""

from tandem.config.multi_turn import ToolCallParser
from tandem.text.answer_events import CallBegun, CallEnded, Content, Unreadable
from tandem.text.answer_reader import AnswerReader
from tandem.text.tool_formats import TOOL_FORMATS
from tandem.text.written_calls import ToolCall

__all__ = ["ToolCall", "content_before_calls", "parse_tool_calls"]


def parse_tool_calls(parser: ToolCallParser, text: str) -> list[ToolCall]:
    """Returns the calls in ``text``, the turn as the model wrote it, special tokens included. A call that is begun and cannot be read has a ``problem``; an
    empty list is an answer without calls."""
    events = AnswerReader(TOOL_FORMATS[parser]).read(text)
    return [event.call for event in events if isinstance(event, CallEnded | Unreadable)]


def content_before_calls(parser: ToolCallParser, text: str) -> str:
    """Returns the text of the turn ``text`` before its first call."""
    parts: list[str] = []
    for event in AnswerReader(TOOL_FORMATS[parser]).read(text):
        if isinstance(event, CallBegun | Unreadable):
            break
        if isinstance(event, Content):
            parts.append(event.text)
    else:
        return ""
    return "".join(parts).strip()
