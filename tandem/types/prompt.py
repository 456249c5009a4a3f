"""A prompt, as the data room makes it and the rollout room reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a task.

    ``id`` is unique within a task and stable over restarts. ``token_ids`` is what the model reads: text is never
    tokenised a second time. ``ground_truth`` and ``columns`` are JSON values that reward functions receive untouched.
    ``messages``: the prompt as a conversation, if its row has one. ``question``: the row's text before any template, or the last message of the user: what
    an agent is given.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    ground_truth: Any = None
    task: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    question: str = ""
