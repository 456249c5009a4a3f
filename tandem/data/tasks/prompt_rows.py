"""Prompts in rows: plain ones, TRL's (text or messages), verl's preprocessed rows and OpenAI's messages with tools.

Sources: TRL, "Dataset formats and types" (prompt-only); verl, "Prepare data for post-training" (``data_source``, ``prompt``, ``ability``,
``reward_model``, ``extra_info``); OpenAI's fine-tuning format (``messages``, ``tools``).
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.data.rows.messages import ASSISTANT, BadMessages, Message, as_text, is_messages, read_messages, read_tools
from tandem.data.rows.row import has_key, keys_of, kind_of, value_at
from tandem.data.tasks.base import TaskItem
from tandem.types import UserError

AUTO = "auto"
PROMPT_KEYS = ("prompt", "messages", "question", "problem")
ANSWER_KEYS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
LOOKED_AT = 100
"""Rows of a file that decide which keys it has."""

PlacedRow = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The keys of a file's rows. ``answer``: of the ground truth, empty if the rows have none. ``has_messages``: prompts are messages, not texts.
    ``answers_last``: the last message is the assistant's and the ground truth, as in OpenAI's format."""

    prompt: str
    answer: str
    has_messages: bool
    answers_last: bool = False

    def describe(self) -> str:
        """Returns what is read from which key, in one line."""
        prompt = f"prompts under '{self.prompt}' ({'messages' if self.has_messages else 'texts'})"
        answer = f"answers under '{self.answer}'" if self.answer else "answers in the last message" if self.answers_last else "no answers"
        return f"{prompt}, {answer}"


def find_keys(rows: Sequence[PlacedRow], prompt_key: str, answer_key: str) -> PromptKeys:
    """Returns the keys of ``rows``. ``auto`` takes the first of ``PROMPT_KEYS`` and ``ANSWER_KEYS`` that a row has; an empty ``answer_key`` is none.
    Raises ``UserError`` where no row has a prompt."""
    first = rows[:LOOKED_AT]
    prompt = prompt_key if prompt_key != AUTO else _first_key(first, PROMPT_KEYS)
    if not prompt:
        where, values = rows[0]
        if "chosen" in values and "rejected" in values:
            raise UserError(f"{where}: the rows are preference pairs without a 'prompt', for DPO; reinforcement learning needs prompts: add the key 'prompt'")
        near = difflib.get_close_matches("prompt", [*values], n=1, cutoff=0.6) or [key for key, value in values.items() if isinstance(value, str)][:1]
        raise UserError(f"{where}: key 'prompt' is missing; the row has {keys_of(values)}: set task.prompt_key to the key of the prompt{_for_example(near)}")
    answer = answer_key if answer_key != AUTO else _first_key(first, ANSWER_KEYS)
    given = next((value_at(values, prompt) for _, values in first if has_key(values, prompt)), None)
    if answer == prompt:
        answer = ""
    last = given[-1] if isinstance(given, list) and is_messages(given) else {}
    return PromptKeys(prompt, answer, is_messages(given), answers_last=not answer and answer_key == AUTO and last.get("role") == ASSISTANT)


def read_prompt(where: str, values: Mapping[str, Any], keys: PromptKeys) -> TaskItem:
    """Returns the prompt of a row, with every other key as a column. Raises ``UserError`` with ``where``."""
    for key in filter(None, (keys.prompt, keys.answer)):
        if not has_key(values, key):
            raise UserError(f"{where}: key '{key}' is missing; the line has {keys_of(values)}")
    prompt = value_at(values, keys.prompt)
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    if keys.has_messages:
        try:
            messages, tools = read_messages(prompt, keys.prompt), read_tools(values.get("tools"))
        except BadMessages as error:
            instead = f" (it is {kind_of(prompt)}, and the first row has messages: use one form in a file)" if not is_messages(prompt) else ""
            raise UserError(f"{where}: {error}{instead}") from None
    elif not isinstance(prompt, str):
        instead = "and the first row has a text: use one form in a file" if is_messages(prompt) else "it must be a text, or a list of messages"
        raise UserError(f"{where}: '{keys.prompt}' is {kind_of(prompt)}; {instead}")
    elif not prompt.strip():
        raise UserError(f"{where}: '{keys.prompt}' is an empty text; give the prompt or remove the line")
    answer = value_at(values, keys.answer) if keys.answer else None
    if keys.answer and (isinstance(answer, bool) or answer is None):
        raise UserError(f"{where}: '{keys.answer}' is {kind_of(answer)}; it must be a text or a number")
    if messages and messages[-1]["role"] == ASSISTANT:
        if not keys.answers_last:
            raise UserError(f"{where}: the last message of '{keys.prompt}' is the assistant's, so there is nothing to answer; remove it")
        *before, last = messages
        messages, answer = tuple(before), last.get("content")
        if not messages or not answer:
            raise UserError(f"{where}: '{keys.prompt}' needs a message before the assistant's, which must have a content")
    elif keys.answers_last:
        raise UserError(f"{where}: the last message of '{keys.prompt}' is not the assistant's, as it is in the first row")
    for reserved in RESERVED_COLUMNS:
        if reserved in values and reserved != keys.prompt:
            raise UserError(f"{where}: key '{reserved}' is reserved for the arguments of reward functions; rename it")
    columns = {key: value for key, value in values.items() if key != keys.prompt}
    return TaskItem(as_text(messages) if messages else prompt, where, answer, columns, messages, tools)


def _first_key(rows: Sequence[PlacedRow], keys: Sequence[str]) -> str:
    return next((key for key in keys if any(has_key(values, key) for _, values in rows)), "")


def _for_example(names: Sequence[str]) -> str:
    return f", for example {names[0]}" if names else ""
