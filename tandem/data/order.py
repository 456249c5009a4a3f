"""The prompts of each draw, as a function of its number and the seed, so that a resume needs no state."""

from collections.abc import Collection
from functools import lru_cache

from tandem.data.counter import counter_random
from tandem.types import UserError


def prompt_indices(draw: int, count: int, seed: int, size: int | None, taken: Collection[int] = ()) -> list[int]:
    """Returns the indices of the ``count`` training prompts of ``draw``: the number of the step, or of the round where steps have several.

    ``size`` is ``None`` for a task that generates its prompts; the indices then count up without end. A finite set is
    shuffled in every epoch, and no prompt occurs twice in an epoch. An epoch has ``size // count`` draws; the prompts left over, different ones in
    each epoch, are skipped, so that no draw holds a prompt twice. ``taken``: indices that the step has drawn already, in the epoch before; others of
    the new epoch take their places. Raises ``UserError`` if ``size`` is smaller than a draw.
    """
    if size is None:
        return list(range(draw * count, (draw + 1) * count))
    if size < count:
        raise UserError(f"the task has {size} training prompts, fewer than rollout.prompts_per_step ({count}); lower it or add prompts")
    epoch, at = divmod(draw, size // count)
    order = _shuffled(seed, epoch, size)
    return [index for index in (*order[at * count :], *order[: at * count]) if index not in taken][:count]


@lru_cache(maxsize=2)
def _shuffled(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    order = list(range(size))
    counter_random("epoch", seed, epoch).shuffle(order)
    return tuple(order)
