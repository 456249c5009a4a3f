"""Answers in OpenAI's Harmony, which gpt-oss writes (https://github.com/openai/harmony): messages with a channel each, of which those of ``analysis`` are
reasoning and those to ``functions.NAME`` are calls."""

import re

from tandem.text.answer_events import Content, Reasoning
from tandem.text.json_call import JsonCall
from tandem.text.pieces import Pieces, Steps

ANALYSIS = "<|channel|>analysis<|message|>"
END = "<|end|>"
MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", END, "<|call|>", "<|return|>")
_BEGINS = ("<|start|>", "<|channel|>")
_ENDS = (END, "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


def read_harmony(source: Pieces, schemas: object) -> Steps[None]:
    """Reads the messages of an answer, whose first begins with its channel. What stands before all messages is text. Messages to a tool of the model's own,
    such as ``browser.search``, are reasoning, as in vLLM."""
    mark = yield from source.pass_until(*_BEGINS)
    has_reasoning = has_content = False
    while mark:
        header, message = yield from source.until("<|message|>")
        header = mark + header
        if not message:
            yield Content(header)
            return
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient and recipient[1].startswith(_FUNCTIONS):
            call = JsonCall(recipient[1].removeprefix(_FUNCTIONS) or "?")
            mark = yield from source.feed_until(call.push, *_ENDS)
            yield from call.finish()
        elif recipient or (channel and channel[1] == "analysis"):
            if has_reasoning:
                yield Reasoning("\n")
            has_reasoning = True
            mark = yield from source.pass_until(*_ENDS, kind=Reasoning)
        else:
            if has_content:
                yield Content("\n")
            has_content = True
            mark = yield from source.pass_until(*_ENDS)
        if mark and mark != _BEGINS[0]:
            mark = yield from source.pass_until(*_BEGINS, is_trimmed=True)
