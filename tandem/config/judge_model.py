"""The section ``judge`` of a reward function ``judge``: a model behind a chat endpoint that gives each completion a score."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.types.errors import UserError

TEMPLATE = """You grade an answer to a question.

Question:
{prompt}

Reference answer:
{ground_truth}

Answer:
{completion}

Compare the answer with the reference. End with one line "Score: N", where N is a number from {minimum} (wrong) to {maximum} (right)."""
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class JudgeModelConfig:
    """How a model is asked for a score. `endpoint.retries`, `endpoint.timeout_s` and `endpoint.token_variable` apply too."""

    url: str = ""
    """The address of an OpenAI endpoint, such as `http://127.0.0.1:8000/v1` for `tandem serve` or vLLM; `/chat/completions` is added."""
    model: str = ""
    """The name of the model there."""
    template: str = TEMPLATE
    """The message. `{prompt}`, `{completion}`, `{ground_truth}`, `{minimum}`, `{maximum}` and `{COLUMN}` of the prompt's row are replaced."""
    system: str = ""
    """A system message before it. Empty: none."""
    pattern: str = r"(?i)score\W*?(-?\d+(?:\.\d+)?)"
    """A regular expression whose group is the score; its last match in the reply counts."""
    minimum: float = 0.0
    """The lowest score, which is the reward 0."""
    maximum: float = 10.0
    """The highest score, which is the reward 1."""
    temperature: float = 0.0
    """The temperature of the judge; above 0 the seed of a request is a function of its sample."""
    max_tokens: int = 512
    """Maximum tokens of a reply."""
    parallel: int = 16
    """Requests that each reward worker has under way."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as `structured_outputs` of vLLM and `tandem serve`, which can force the form of the reply."""

    def check(self) -> None:
        if not self.model or not self.url:
            raise UserError(f"section 'judge' of a reward function needs '{'url' if not self.url else 'model'}'")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise UserError(f"'judge.pattern' of a reward function is {self.pattern!r}, which is not a valid regular expression: {error}") from None
        if groups != 1:
            raise UserError(f"'judge.pattern' of a reward function is {self.pattern!r}, which has {groups} groups; it needs one, the score")
        if "completion" not in PLACEHOLDER.findall(self.template):
            raise UserError("'judge.template' of a reward function has no {completion}; the judge would not see what it scores")
        if not -1e6 <= self.minimum < self.maximum <= 1e6:
            raise UserError(f"'judge.minimum' and 'judge.maximum' of a reward function are {self.minimum:g} and {self.maximum:g}; the second must be larger")
        if not 0 <= self.temperature <= 2:
            raise UserError(f"'judge.temperature' of a reward function is {self.temperature}; it must be from 0 to 2")
        for name in ("max_tokens", "parallel"):
            if not 1 <= getattr(self, name) <= 10**6:
                raise UserError(f"'judge.{name}' of a reward function is {getattr(self, name)}; it must be from 1 to 1000000")
