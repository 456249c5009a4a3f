"""Mixes several streams in given proportions: the stream of sequence ``i`` is a function of (weights, seed, i)."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import floor

from tandem.data.counter import counter_random
from tandem.types import UserError

BLOCK = 1024
HALF = Fraction(1, 2)


class Mixture:
    """``weights[d]``: the share of stream d, any positive numbers. After n sequences each stream has contributed its share of n to within
    one block; within a block of about 1,024 the order is random. The k-th sequence taken from a stream is its k-th."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        if not weights:
            raise UserError("the mixture has no dataset; name at least one")
        for weight in weights:
            if not 0 < weight < float("inf"):
                raise UserError(f"the weight of a dataset is {weight}; it must be above 0, and finite")
        # Exact decimal fractions: 0.1 is a tenth, not the nearest binary fraction.
        exact = [Fraction(str(weight)) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        self.seed = seed
        self._block = lru_cache(maxsize=4)(self._block_of)

    def place(self, index: int) -> tuple[int, int]:
        """Returns (stream, index in that stream) of sequence ``index``."""
        block = index // BLOCK
        # Because of rounding a block may differ from BLOCK by at most the number of streams.
        block = bisect_right(range(block + len(self._shares) + 2), index, key=lambda b: sum(self._taken(b))) - 1
        streams, counts = self._block(block)
        nth = index - sum(self._taken(block))
        return streams[nth], counts[nth]

    def _taken(self, block: int) -> list[int]:
        """Returns the number of sequences of each stream in the blocks before ``block``: its share, rounded, which never decreases."""
        return [floor(share * BLOCK * block + HALF) for share in self._shares]

    def _block_of(self, block: int) -> tuple[list[int], list[int]]:
        before, after = self._taken(block), self._taken(block + 1)
        streams = [stream for stream, (first, last) in enumerate(zip(before, after, strict=True)) for _ in range(last - first)]
        counter_random("mixture", self.seed, block).shuffle(streams)
        following = list(before)
        counts = []
        for stream in streams:
            counts.append(following[stream])
            following[stream] += 1
        return streams, counts


def mixed(streams: Sequence[Callable[[int], object]], weights: Sequence[float], seed: int) -> Callable[[int], object]:
    """Returns sequence ``i`` of the mixture of ``streams`` as a function; each stream is a function of its own index."""
    mixture = Mixture(weights, seed)

    def sequence(index: int) -> object:
        stream, nth = mixture.place(index)
        return streams[stream](nth)

    return sequence
