"""The interface of tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tandem.data.split import Split


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One instance. ``text``: the question, before any template. ``where``: a file and line or an index, for messages.
    ``ground_truth`` and ``columns`` are JSON values. ``messages``: the question as a conversation, which the chat template formats with ``tools``; ``text``
    is then its JSON text."""

    text: str
    where: str
    ground_truth: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


class Demonstration(NamedTuple):
    """A training instance and its demonstrated completion; ``correct`` is false for one made wrong on purpose. ``turns``: the messages of an episode with
    tools, whose last one is the completion; empty: the completion alone."""

    item: TaskItem
    completion: str
    correct: bool
    turns: tuple[Mapping[str, Any], ...] = ()


class Task(Protocol):
    """A source of instances. Everything is a function of the task's seed and the index, so that instances can be read in any order.
    ``size``: the number of training instances, ``None`` if they are generated on demand. ``fingerprint``: changes when the instances
    change. ``has_messages``: instances have messages, not text alone. ``files``: the digest of each file that was read."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def has_messages(self) -> bool: ...

    @property
    def files(self) -> Mapping[str, str]: ...

    def train_prompt(self, index: int) -> TaskItem:
        """Returns training instance ``index``, which is below ``size`` if the task has one."""
        ...

    def eval_prompts(self, split: Split, count: int, seed: int) -> list[TaskItem]:
        """Returns up to ``count`` instances of ``held_out`` or ``final``, none of which is ever a training instance."""
        ...

    def demonstration(self, index: int, seed: int, corrupted_share: float) -> Demonstration:
        """Returns a training instance with an answer, which is wrong for ``corrupted_share`` of all indices. Raises ``UserError`` if the
        task has no answers or cannot make wrong ones."""
        ...

    def close(self) -> None:
        """Ends the processes that the task started."""
        ...
