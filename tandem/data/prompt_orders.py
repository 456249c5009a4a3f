"""Which training prompts of a task a draw takes, as section ``rollout.prompt_order`` says."""

from collections.abc import Collection, Mapping
from functools import partial

from tandem.config.prompt_order import PromptOrderConfig
from tandem.data.order import indices_after, ordered_indices, prompt_indices, shuffled, weighted_indices
from tandem.data.rows.row import has_key, kind_of, value_at
from tandem.data.tasks.base import Task
from tandem.types import UserError


class PromptOrder:
    """Chooses ``count`` prompts of ``task`` for each draw. Raises ``UserError`` where the task cannot be ordered so."""

    def __init__(self, config: PromptOrderConfig, task: Task, seed: int, count: int) -> None:
        self.config, self.count, self._seed, self._size, self._task = config, count, seed, task.size, task
        if config.by != "shuffle" and task.size is None:
            raise UserError(f"'rollout.prompt_order.by' is '{config.by}', and task '{task.name}' generates its prompts without end; set it to shuffle")
        size = task.size or 0
        self._order = range(size) if config.by != "difficulty" else sorted(shuffled(seed, 0, size), key=partial(_difficulty, task, config.difficulty_key))

    def indices(self, draw: int, taken: Collection[int] = (), success_rates: Mapping[int, float] | None = None) -> list[int]:
        """Returns the indices of the prompts of ``draw``, none of which is among ``taken``. ``success_rates``: by index, for ``success_rate``."""
        if self.config.by == "shuffle":
            return prompt_indices(draw, self.count, self._seed, self._size, taken)
        if self.config.by == "success_rate":
            return weighted_indices(draw, self.count, self._seed, self.weights(success_rates or {}), taken)
        return ordered_indices(draw, self.count, self._order, taken)

    def after(
        self, passed: int, count: int, taken: Collection[int], success_rates: Mapping[int, float] | None = None
    ) -> tuple[list[int], int]:
        """Returns the next ``count`` indices after the first ``passed`` places of the order, without those ``taken``, and how many places are passed then.
        ``success_rate`` has no order: ``passed`` is the number of the draw."""
        if self.config.by == "success_rate":
            return weighted_indices(passed, count, self._seed, self.weights(success_rates or {}), taken), passed + count
        order = None if self.config.by == "shuffle" else self._order
        return indices_after(passed, count, self._seed, self._size, taken, order)

    def weights(self, success_rates: Mapping[int, float]) -> list[float]:
        """Returns the weight of each prompt: 1 - its success rate, at least ``solved_weight``."""
        return [max(1.0 - success_rates.get(index, 0.0), self.config.solved_weight) for index in range(self._size or 0)]

    def difficulty(self, index: int) -> float:
        """Returns the difficulty of prompt ``index``, for ``difficulty``."""
        return _difficulty(self._task, self.config.difficulty_key, index)

    def epoch(self, draw: int) -> float:
        """Returns the passes over the prompts before ``draw``, 0 for a task that generates them."""
        if self._size is None:
            return 0.0
        return draw / (self._size // self.count) if self.config.by == "shuffle" else draw * self.count / self._size


def _difficulty(task: Task, key: str, index: int) -> float:
    item = task.train_prompt(index)
    if not has_key(item.columns, key):
        raise UserError(f"{item.where}: the difficulty '{key}' (rollout.prompt_order.difficulty_key) is missing; name a key that every row has")
    value = value_at(item.columns, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise UserError(f"{item.where}: the difficulty '{key}' (rollout.prompt_order.difficulty_key) is {kind_of(value)}; it must be a number")
    return float(value)
