"""Answers in the form of OpenAI's chat completions."""

from collections.abc import Iterable
from typing import Any

from tandem.serving.forms.answer import Answer
from tandem.text.answer_events import CallArguments, CallBegun, Content, Event, Reasoning


def chat_message(answer: Answer, role: str = "assistant", has_reasoning: bool = False) -> dict[str, Any]:
    """Returns the message of ``role``. ``has_reasoning``: with vLLM's field ``reasoning``, and ``reasoning_content``, its name in earlier versions, which
    other clients read."""
    message: dict[str, Any] = {"role": role, "content": answer.content if answer.content or not answer.calls else None}
    if has_reasoning:
        message |= {"reasoning": answer.reasoning or None, "reasoning_content": answer.reasoning or None}
    if answer.calls:
        calls = [{"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}} for each in answer.calls]
        message["tool_calls"] = calls
    return message


class ChatDeltas:
    """The deltas of one streamed message."""

    def __init__(self) -> None:
        self._calls = 0

    def take(self, events: Iterable[Event]) -> dict[str, Any]:
        """Returns the delta with ``events``, empty for none."""
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Reasoning(text):
                    delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + text
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case CallBegun(name, id):
                    calls.append({"index": self._calls, "id": id, "type": "function", "function": {"name": name, "arguments": ""}})
                    self._calls += 1
                case CallArguments(text):
                    if not calls:
                        calls.append({"index": self._calls - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        return delta | ({"tool_calls": calls} if calls else {})
