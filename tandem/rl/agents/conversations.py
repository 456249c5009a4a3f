"""The token ids of the conversations of agents: what was sampled is read again by its ids, and never encoded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.multi_turn import ToolCallParser
from tandem.rl.agents.model_calls import ModelCall
from tandem.text.chat import ChatTemplate
from tandem.text.messages import Message, without_ids
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_calls import content_before_calls, parse_tool_calls
from tandem.text.tool_turns import Call, ToolTurns
from tandem.types import UserError


@dataclass(frozen=True, slots=True)
class Conversations:
    """``templates``: without and with tools. ``turns``: what stands between a sampled turn and the next. ``parser``: reads the calls of tools."""

    tokenizer: Tokenizer
    templates: tuple[ChatTemplate, ChatTemplate]
    turns: ToolTurns
    parser: ToolCallParser

    @classmethod
    def open(cls, folder: Path, parser: ToolCallParser) -> "Conversations":
        """Raises ``UserError`` where the tokenizer in ``folder`` has no chat template, or names no end token."""
        tokenizer = Tokenizer.from_folder(folder)
        plain, with_tools = (ChatTemplate.from_folder(folder, with_tools=each, knows_today=False) for each in (False, True))
        return cls(tokenizer, (plain, with_tools), ToolTurns.of_agent(with_tools, tokenizer), parser)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], earlier: Sequence[ModelCall]) -> tuple[list[int], ModelCall | None]:
        """Returns the token ids that the model reads for ``messages``, and which of the ``earlier`` calls they continue: the longest one whose messages and
        answer they begin with. Raises ``UserError`` for messages that the chat template refuses, and for ``tools`` that it does not show."""
        self.templates[bool(tools)].check_tools(tools)
        same = [call for call in earlier if not call.is_text and call.tools == tools and _begins_with(messages, [*call.messages, call.answer])]
        for parent in sorted(same, key=lambda call: (-len(call.messages), list(call.token_ids))):
            try:
                new = messages[len(parent.messages) + 1 :]
                return parent.read + self.turns.following(parent.tool_calls, new, parent.token_ids[-1] if parent.token_ids else None), parent
            except UserError:  # The template shows them in a whole conversation alone.
                continue
        text = self.templates[bool(tools)].render(messages, tools=list(tools) or None)
        return self.tokenizer.encode(text), None

    def text_prompt(self, prompt: str | Sequence[int], earlier: Sequence[ModelCall]) -> tuple[list[int], ModelCall | None]:
        """Returns the token ids of the plain ``prompt``, and which of the ``earlier`` plain calls it continues: the longest one that it begins with, with
        everything that was sampled. Raises ``UserError`` for text that the tokenizer does not know."""
        plain = sorted((call for call in earlier if call.is_text), key=lambda call: (-len(call.read), call.read))
        if not isinstance(prompt, str):
            parent = next((call for call in plain if list(prompt[: len(call.read)]) == call.read), None)
            return list(prompt), parent
        for parent in plain:
            before = self.tokenizer.decode(parent.read, skip_special_tokens=False)
            if len(prompt) > len(before) and prompt.startswith(before):
                return parent.read + self.tokenizer.encode(prompt[len(before) :]), parent
        return self.tokenizer.encode(prompt), None

    def answer(self, token_ids: Sequence[int], text: str, finish_reason: str, tools: Sequence[Mapping[str, Any]], turn: int) -> tuple[Message, list[Call]]:
        """Returns the assistant's message with the sampled ``token_ids``, and its calls where the request offers ``tools``. ``turn``: the number of turns
        before it, which is in the names of its calls. A call that cannot be read is content."""
        last = token_ids[-1] if token_ids else None
        written = token_ids[:-1] if last in self.turns.ends else token_ids
        raw = self.tokenizer.decode([token for token in written if token < self.tokenizer.vocab_size], skip_special_tokens=False)
        found = parse_tool_calls(self.parser, raw) if tools and finish_reason == "stop" else []
        if not found or any(call.problem for call in found):
            return {"role": "assistant", "content": text}, []
        known = [Call(call.name, call.id or f"call{turn % 100:02}{number % 1000:03}") for number, call in enumerate(found)]
        functions = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": dict(call.arguments)}}
            for call, each in zip(found, known, strict=True)
        ]
        return {"role": "assistant", "content": content_before_calls(self.parser, raw), "tool_calls": functions}, known


def _begins_with(messages: Sequence[Message], earlier: Sequence[Message]) -> bool:
    return len(messages) > len(earlier) and all(without_ids(ours) == without_ids(theirs) for ours, theirs in zip(messages, earlier, strict=False))
