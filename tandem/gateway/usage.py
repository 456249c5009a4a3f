"""How many tokens a request has cost, by what the backend says of it."""

import re
from dataclasses import dataclass

_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,9})')
_TOTAL = re.compile(rb'"total_tokens"\s*:\s*(\d{1,9})')
"""All that rerankers say: they generate nothing."""
_COMPLETION = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,9})')


def read_usage(answer: bytes) -> tuple[int | None, int | None]:
    """Returns the last counts of prompt and generated tokens in ``answer``, ``None`` where there is none.

    The text of an answer cannot feign them: a quote within a JSON string is escaped, so the pattern with its bare quotes is a key of the answer's own, and
    ``usage`` comes last."""
    prompt, completion = _PROMPT.findall(answer), _COMPLETION.findall(answer)
    if not prompt and not completion:
        prompt = _TOTAL.findall(answer)
    return (int(prompt[-1]) if prompt else None), (int(completion[-1]) if completion else None)


@dataclass
class Meter:
    """What one request has cost so far. ``prompt``: estimated until the backend says it. ``is_answered``: a backend has answered without an error."""

    prompt: int
    output: int = 0
    is_answered: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that count against limits: none for a request that no backend has answered."""
        return self.prompt + self.output if self.is_answered else 0

    @property
    def input_tokens(self) -> int:
        """Those of them that are the prompt's."""
        return self.prompt if self.is_answered else 0

    def events(self, events: bytes) -> int:
        """Counts the tokens of streamed ``events``, by what they say or one for each; returns how many are new."""
        before = self.output
        self.is_answered = True
        if not self._read(events):
            self.output += events.count(b"data:") - events.count(b"data: [DONE]")
        return max(0, self.output - before)

    def whole(self, answer: bytes) -> int:
        """Counts the tokens of a complete ``answer``; returns those generated."""
        self.is_answered = True
        self._read(answer)
        return self.output

    def _read(self, answer: bytes) -> bool:
        if b'"usage"' not in answer:
            return False
        prompt, output = read_usage(answer)
        self.prompt = self.prompt if prompt is None else prompt
        self.output = self.output if output is None else output
        return output is not None
