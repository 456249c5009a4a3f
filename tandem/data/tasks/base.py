"""What every task can do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tandem.data.split import Split


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One instance. ``text``: what is asked, before any template. ``where``: for messages, a file and line or an index.
    ``ground_truth`` and ``columns`` are JSON values."""

    text: str
    where: str
    ground_truth: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)


class Demonstration(NamedTuple):
    """A training instance and what is shown as its completion; ``correct`` is false for one made wrong on purpose."""

    item: TaskItem
    completion: str
    correct: bool


class Task(Protocol):
    """A source of instances. Everything is a function of the task's seed and the index, so any position can be asked
    for first. ``size``: training instances, ``None`` where they are made on demand. ``fingerprint``: changes where the
    instances would."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None: ...

    @property
    def fingerprint(self) -> str: ...

    def train_prompt(self, index: int) -> TaskItem:
        """Training instance ``index``, below ``size`` where there is one."""
        ...

    def eval_prompts(self, split: Split, count: int, seed: int) -> list[TaskItem]:
        """Up to ``count`` instances of ``held_out`` or ``final``, none of which is ever a training instance."""
        ...

    def demonstration(self, index: int, seed: int, corrupted_share: float) -> Demonstration:
        """A training instance with an answer, which is wrong for ``corrupted_share`` of all indices. Raises
        ``UserError`` where the task has no answers or cannot make wrong ones."""
        ...

    def close(self) -> None:
        """End what the task started, if anything."""
        ...
