"""The text of a conversation, rendered by a server without delaying its other requests."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.serving.errors import ApiError
from tandem.serving.prompts import Conversation, PromptReader
from tandem.serving.protocol import ChatMessage
from tandem.text import rendering_limits
from tandem.text.chat import ChatTemplate

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
QUESTION = ChatMessage(role="user", content="1+2?")
CALLS: Any = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
WRITES_TEXT = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '(' + c.function.arguments + ')' }}{% endfor %}{% endfor %}"
WITH_CALLS = [QUESTION, ChatMessage(role="assistant", content=None, tool_calls=CALLS)]


def template_of(folder: Path, source: str) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text("{}")
    return ChatTemplate.from_folder(folder, source=source)


def reader() -> tuple[PromptReader, Any]:
    """Returns what reads a request's prompts, and the state of the request. Nothing is encoded."""
    request: Any = SimpleNamespace(state=SimpleNamespace())
    nothing: Any = None
    return PromptReader(nothing, nothing, request), request.state


@pytest.mark.parametrize("messages", [[QUESTION], WITH_CALLS], ids=["a question", "earlier calls"])
def test_a_template_without_end_is_rendered_once_while_the_event_loop_answers(messages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering_limits, "MOST_SECONDS", 1.0)
    template = template_of(tmp_path, ENDLESS)
    gaps = []

    async def tick() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.01)
            gaps.append(time.thread_time() - began)

    async def ask() -> None:
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="it takes more than 1 seconds of processor time"):
            await reader()[0].chat_text(template, Conversation(messages))
        ticking.cancel()

    began = time.process_time()
    asyncio.run(ask())
    # Of the thread of the loop, which has at most its own 20 ms at once; and of all threads, once the bound.
    assert len(gaps) > 10 and max(gaps) < 0.5
    assert time.process_time() - began < 1.8


def test_tools_that_a_template_of_text_arguments_does_not_show_are_noticed_after_earlier_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, ignores in ((WRITES_TEXT, True), ("{% if tools %}{{ tools | tojson }}{% endif %}" + WRITES_TEXT, False)):
        asked, state = reader()
        text = asyncio.run(asked.chat_text(template_of(tmp_path, source), Conversation(WITH_CALLS, tools=TOOLS)))
        assert '({"a": 1})' in text
        assert hasattr(state, "warning") is ignores
        logged = "".join(capsys.readouterr())
        assert ("writes the same text with the tool and without" in logged) is ignores
