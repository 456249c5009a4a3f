"""The prompts of each step, as a function of the step alone, so that a resume needs no state."""

from functools import lru_cache

from tandem.data.counter import counter_random
from tandem.types import UserError


def prompt_indices(step: int, prompts_per_step: int, seed: int, size: int | None) -> list[int]:
    """Returns the indices of the training prompts of ``step``.

    ``size`` is ``None`` for a task that generates its prompts; the indices then count up without end. A finite set is
    shuffled in every epoch, and no prompt occurs twice in an epoch. An epoch has ``size // prompts_per_step`` steps; the
    prompts left over, different ones in each epoch, are skipped, so that no step holds a prompt twice. Raises ``UserError``
    if ``size`` is smaller than a step.
    """
    if size is None:
        return list(range(step * prompts_per_step, (step + 1) * prompts_per_step))
    if size < prompts_per_step:
        raise UserError(
            f"the task has {size} training prompts, fewer than rollout.prompts_per_step ({prompts_per_step}); lower it or add prompts"
        )
    epoch, at = divmod(step, size // prompts_per_step)
    return list(_shuffled(seed, epoch, size)[at * prompts_per_step : (at + 1) * prompts_per_step])


@lru_cache(maxsize=2)
def _shuffled(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    order = list(range(size))
    counter_random("epoch", seed, epoch).shuffle(order)
    return tuple(order)
