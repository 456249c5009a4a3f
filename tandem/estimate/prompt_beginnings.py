"""What prompts begin with in common, and how much of it is in one micro-batch. Imports no torch."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

MANY = 1 << 20
"""Prompts that begin alike where all do."""


class Tokens(NamedTuple):
    """``tokens``, and ``attended``, twice the sum of the positions of their middles: the first n tokens of a sequence have n^2."""

    tokens: float
    attended: float


class Common(NamedTuple):
    """``tokens`` at which exactly ``prompts`` prompts have not differed yet, and ``attended`` of ``Tokens``."""

    prompts: int
    tokens: float
    attended: float


@dataclass(frozen=True, slots=True)
class Prompts:
    """The tokens of prompts: their ``mean``, the mean ``square`` of their lengths, and what is ``common`` to several of the ``known`` ones, those of a step.
    Without known ones none begin alike."""

    mean: float
    square: float
    known: int = 0
    common: tuple[Common, ...] = ()

    @classmethod
    def of_mean(cls, tokens: float) -> "Prompts":
        """Returns prompts of which nothing but their mean length is known."""
        return cls(tokens, tokens**2)

    @classmethod
    def with_prefix(cls, tokens: float, prefix: float) -> "Prompts":
        """Returns prompts of ``tokens`` on average that all begin with the same ``prefix`` tokens."""
        return cls(tokens, tokens**2, MANY, (Common(MANY, prefix, prefix**2),))

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> "Prompts":
        """Returns the prompts with these token ids, at least one."""
        count, attended = Counter[int](), Counter[int]()
        for together, first, last in _common_tokens(sorted(map(tuple, prompts))):
            count[together] += last - first
            attended[together] += last**2 - first**2
        known = len(prompts)
        common = tuple(Common(together, count[together], attended[together]) for together in sorted(count))
        return cls(sum(map(len, prompts)) / known, sum(len(each) ** 2 for each in prompts) / known, known, common)

    def with_lengths(self, mean: float, square: float) -> "Prompts":
        """Returns such prompts of other lengths: what shorter ones begin with in common is shorter in proportion, so that each keeps tokens of its own; longer
        ones begin with the same tokens."""
        if not self.common:
            return Prompts(mean, square)
        tokens, attended = min(1.0, mean / self.mean), min(1.0, square / self.square)
        common = tuple(Common(each.prompts, each.tokens * tokens, each.attended * attended) for each in self.common)
        return Prompts(mean, square, self.known, common)

    def repeated(self, drawn: float) -> Tokens:
        """Returns the tokens of ``drawn`` prompts that are computed for another one already if all are in one micro-batch, on average over the ways to draw
        them from the known ones (rarefaction; Hurlbert, 1971, "The Nonconcept of Species Diversity", equation 14)."""
        if not self.common or drawn <= 1:
            return Tokens(0.0, 0.0)
        # Of more than are known, each further lot is only known to be as alike as these.
        lots, drawn = max(1.0, drawn / self.known), min(drawn, self.known)
        repeats = [(each, lots * (drawn * each.prompts / self.known - met(self.known, each.prompts, drawn))) for each in self.common]
        return Tokens(sum(each.tokens * times for each, times in repeats), sum(each.attended * times for each, times in repeats))


NOT_KNOWN = Prompts(0.0, 0.0)


def met(among: float, marked: int, drawn: float) -> float:
    """Returns the probability that at least one of ``marked`` things is drawn where ``drawn`` of ``among`` are: 1 less the product of
    (among - drawn - place) / (among - place) over the places before ``marked``, each factor a quotient of two values of the gamma function."""
    others = among - drawn
    if others <= marked - 1:
        return 1.0
    missed = math.lgamma(others + 1) - math.lgamma(others + 1 - marked) - math.lgamma(among + 1) + math.lgamma(among + 1 - marked)
    return -math.expm1(min(0.0, missed))


def _common_tokens(ordered: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int, int]]:
    """Yields (prompts, first, last): so many prompts, and no further one, begin with the same ``last`` tokens, of which those from ``first`` on are these
    prompts' alone. ``ordered``: the prompts, sorted, so that those that begin alike are neighbours."""
    begun = [(0, 0)]  # (tokens in common, the first prompt that has them), of which each is longer than the one before it
    lengths = [_common_length(before, after) for before, after in pairwise(ordered)]
    for place, length in enumerate([*lengths, 0], start=1):
        first = place - 1
        while begun[-1][0] > length:
            last, first = begun.pop()
            yield place - first, max(length, begun[-1][0]), last
        if length > begun[-1][0]:
            begun.append((length, first))


def _common_length(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
