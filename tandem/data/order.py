"""The prompts of each draw, as a function of its number, the seed and, in one order, of what was solved before, so that a resume needs no state."""

import math
from collections.abc import Collection, Sequence
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
    check_size(size, count)
    epoch, at = divmod(draw, size // count)
    return _from(shuffled(seed, epoch, size), at * count, count, taken)


def ordered_indices(draw: int, count: int, order: Sequence[int], taken: Collection[int] = ()) -> list[int]:
    """Returns the next ``count`` indices of ``order``, which begins again when it ends; ``taken`` as for ``prompt_indices``."""
    check_size(len(order), count)
    return _from(order, draw * count % len(order), count, taken)


def weighted_indices(draw: int, count: int, seed: int, weights: Sequence[float], taken: Collection[int] = ()) -> list[int]:
    """Returns ``count`` different indices drawn one after the other with probabilities in proportion to ``weights``, all above 0, of those that are left.

    Each index has a waiting time, exponential with its weight as the rate; the shortest come first. The first is index i with probability w_i / sum w,
    and so on among the others (Efraimidis and Spirakis, 2006, "Weighted random sampling with a reservoir"). ``taken``: indices that are left out.
    """
    check_size(len(weights), count)
    random = counter_random("weighted", seed, draw)
    # 1 - u is in (0, 1].
    waits = [-math.log(1.0 - random.random()) / weight for weight in weights]
    return sorted((index for index in range(len(weights)) if index not in taken), key=lambda index: (waits[index], index))[:count]


def check_size(size: int, count: int) -> None:
    """Raises ``UserError`` if a task of ``size`` prompts has fewer than a draw of ``count``."""
    if size < count:
        raise UserError(f"the task has {size} training prompts, fewer than rollout.prompts_per_step ({count}); lower it or add prompts")


def indices_after(
    passed: int, count: int, seed: int, size: int | None, taken: Collection[int], order: Sequence[int] | None = None
) -> tuple[list[int], int]:
    """Returns the indices of the next ``count`` training prompts after the first ``passed`` places of all epochs, without those ``taken``, and how many places
    are passed then. ``size``: as in ``prompt_indices``; ``order``: of every epoch (``None``: each is shuffled). At least ``count`` must not be taken."""
    if size is None:
        return list(range(passed, passed + count)), passed + count
    chosen: list[int] = []
    while len(chosen) < count:
        epoch, at = divmod(passed, size)
        index = (shuffled(seed, epoch, size) if order is None else order)[at]
        if index not in taken and index not in chosen:
            chosen.append(index)
        passed += 1
    return chosen, passed


@lru_cache(maxsize=2)
def shuffled(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """Returns the indices below ``size`` in the random order of ``epoch``."""
    order = list(range(size))
    counter_random("epoch", seed, epoch).shuffle(order)
    return tuple(order)


def _from(order: Sequence[int], start: int, count: int, taken: Collection[int]) -> list[int]:
    return [index for index in (*order[start:], *order[:start]) if index not in taken][:count]
