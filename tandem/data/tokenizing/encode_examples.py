"""Encodes examples as tokens and a mask of the learned ones: those of the completion, or of the assistant's turns."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from tandem.data.examples import BrokenExample, Example
from tandem.data.rows.messages import ASSISTANT
from tandem.text.chat import ChatTemplate
from tandem.text.generation_marks import MARKS, take_out_marks
from tandem.types import UserError

Span = tuple[int, int]
Encoded = tuple[list[int], list[int]]
"""Token ids, and for each 1 if it is learned, else 0."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """``text``: a conversation of which the characters in ``spans`` are learned, or a completion, which is learned whole, after
    ``prompt`` (``None``: a conversation)."""

    text: str
    spans: tuple[Span, ...] = ()
    prompt: str | None = None


class ExampleEncoder:
    """``folder``: of the tokenizer and its chat template, which is read with the first conversation. ``end``: the token that
    every completion ends with; conversations end as the template says."""

    def __init__(self, folder: str | Path, backend: tokenizers.Tokenizer, end: int | None) -> None:
        self._folder, self._backend = Path(folder), backend
        self._end = [] if end is None else [end]
        self._compiled: dict[bool, ChatTemplate] = {}

    def render(self, example: Example) -> Rendered:
        """Returns the text of ``example``. Raises ``BrokenExample`` if the template refuses it, ``UserError`` if the template itself is
        unusable."""
        if not example.messages:
            return Rendered(example.completion, prompt=example.prompt)
        if any(mark in json.dumps([example.messages, example.tools], ensure_ascii=False) for mark in MARKS):
            raise BrokenExample("it contains a noncharacter (U+FDD0 or U+FDD1)")
        with_tools = bool(example.tools)
        if with_tools not in self._compiled:
            # The current date would make the shards differ from one day to the next.
            self._compiled[with_tools] = ChatTemplate.from_folder(self._folder, with_tools, marks=MARKS, knows_today=False)
        template = self._compiled[with_tools]
        whole = self._render(template, example, len(example.messages))
        template.check_tools(example.tools)
        if example.answer_from is not None:
            whole = take_out_marks(whole)[0]
            return Rendered(whole, ((self._answer_start(template, example, example.answer_from, whole), len(whole)),))
        if template.has_generation:
            return Rendered(*take_out_marks(whole))
        return Rendered(whole, tuple(self._turn(template, example, i, whole) for i, m in enumerate(example.messages) if m["role"] == ASSISTANT))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Returns the tokens and mask of each. A prompt is encoded apart from its completion, with the special tokens that generation puts
        before it, so that training continues the same tokens as generation. The first token is not learned, because nothing predicts it."""
        prompts = [one.prompt for one in rendered if one.prompt is not None]
        before = iter(self._backend.encode_batch_fast(prompts, add_special_tokens=True))
        encoded = []
        for one, encoding in zip(rendered, self._backend.encode_batch([one.text for one in rendered], add_special_tokens=False), strict=True):
            if one.prompt is None:
                ids, learned = encoding.ids, _mask(encoding, one.spans)
            else:
                asked, answer = next(before).ids, encoding.ids + self._end
                ids, learned = asked + answer, [0] * len(asked) + [1] * len(answer)
            encoded.append((ids, [0, *learned[1:]] if ids else []))
        return encoded

    def _render(self, template: ChatTemplate, example: Example, count: int, is_asked: bool = False) -> str:
        try:
            return template.render(example.messages[:count], add_generation_prompt=is_asked, tools=example.tools or None)
        except UserError as error:
            raise BrokenExample(str(error)) from None

    def _answer_start(self, template: ChatTemplate, example: Example, first: int, whole: str) -> int:
        """Returns the character of ``whole`` at which the answer begins, message ``first``: after its generation prompt, as in TRL."""
        before = take_out_marks(self._render(template, example, first, is_asked=True))[0]
        if not whole.startswith(before):
            raise UserError(
                f"the chat template of '{self._folder}' renders a prompt differently with its answer after it, so where the answer begins is unknown; "
                "change the template, or name texts"
            )
        return len(before)

    def _turn(self, template: ChatTemplate, example: Example, number: int, whole: str) -> Span:
        """Returns the characters of message ``number``: what rendering with it adds to its generation prompt."""
        before, through = self._render(template, example, number, is_asked=True), self._render(template, example, number + 1)
        if not whole.startswith(through) or not through.startswith(before):
            raise UserError(
                f"the chat template of '{self._folder}' renders message {number + 1} differently depending on what follows it, so the "
                "learned text is unknown; put {% generation %} and {% endgeneration %} around what the assistant writes in the template"
            )
        return len(before), len(through)


def _mask(encoding: tokenizers.Encoding, spans: Sequence[Span]) -> list[int]:
    """Returns 1 for each token from the first to the last one that has a character in one of ``spans``, else 0."""
    learned = [0] * len(encoding.ids)
    for start, stop in spans:
        inside = [i for i, (first, after) in enumerate(encoding.offsets) if first < stop and after > start]
        if inside:
            learned[inside[0] : inside[-1] + 1] = [1] * (inside[-1] + 1 - inside[0])
    return learned
