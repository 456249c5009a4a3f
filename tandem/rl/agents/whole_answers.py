"""The answer of a call in the forms in which clients read it. It is complete when it is sent."""

import json
from collections.abc import Iterator
from typing import Any

from tandem.rl.agents.model_calls import ModelCall
from tandem.serving.forms.answer import Answer, Call
from tandem.serving.forms.anthropic import MessageWriter
from tandem.serving.forms.responses import ResponseWriter


def answer_of(call: ModelCall) -> Answer:
    """Returns the answer of ``call``."""
    reason = "length" if call.finish_reason == "length" else "tool_calls" if call.tool_calls else "stop"
    calls = [
        Call(each["id"], each["function"]["name"], [json.dumps(each["function"]["arguments"], ensure_ascii=False)])
        for each in call.answer.get("tool_calls", ())
    ]
    content = call.answer["content"]
    return Answer([], [content] if content else [], calls, reason, call.stop_text, len(call.prompt), len(call.token_ids))


def answer_events(call: ModelCall, writer: ResponseWriter | MessageWriter) -> Iterator[dict[str, Any]]:
    """Yields the events of a stream with the answer of ``call``, which ``writer`` writes."""
    answer = answer_of(call)
    yield from writer.begin(answer.prompt)
    yield from writer.take(answer.events())
    yield from writer.finish(answer)


def whole_answer(call: ModelCall, writer: ResponseWriter | MessageWriter) -> dict[str, Any]:
    """Returns the object with the answer of ``call``, which ``writer`` writes."""
    for _ in answer_events(call, writer):
        pass
    return writer.whole
