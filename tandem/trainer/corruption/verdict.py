"""Decides which ranks computed wrong bits, from what several ranks computed of the same micro-batch. Imports no torch."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Computation(NamedTuple):
    """``digest``: of loss and gradients, as ``rank`` computed them; ``is_repeat``: after a disagreement."""

    rank: int
    digest: str
    is_repeat: bool


class Verdict(NamedTuple):
    """``digest``: the value that counts (``None``: undecided). ``wrong``: the ranks that computed another one, ascending; if undecided, all that took part.
    ``persistent``: those of them whose repeated computation was wrong too."""

    digest: str | None
    wrong: tuple[int, ...]
    persistent: tuple[int, ...]


def judge(computations: Sequence[Computation]) -> Verdict:
    """Returns the verdict on one micro-batch: the value of most ranks counts, and among equals the one that was computed more often.

    With two replicas a rank that does not reproduce its own result is wrong; if both reproduce different results, it cannot be known which one is wrong."""
    ranks, times = defaultdict[str, set[int]](set), defaultdict[str, int](int)
    for each in computations:
        ranks[each.digest].add(each.rank)
        times[each.digest] += 1
    weights = {digest: (len(ranks[digest]), times[digest]) for digest in ranks}
    largest = max(weights.values())
    best = [digest for digest, weight in weights.items() if weight == largest]
    if len(best) > 1:
        everyone = tuple(sorted({each.rank for each in computations}))
        return Verdict(None, everyone, everyone)
    [right] = best
    wrong = {each.rank for each in computations if each.digest != right}
    persistent = {each.rank for each in computations if each.digest != right and each.is_repeat}
    return Verdict(right, tuple(sorted(wrong)), tuple(sorted(persistent)))
