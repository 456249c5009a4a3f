"""The endless order of examples: example ``i`` is a function of (dataset, seed, longest, i) alone.

Shards and examples are shuffled in every epoch as in ``stream``; an example is never split and never joined with another. A preference pair
is an example of two documents.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache

from tandem.data.counter import counter_random
from tandem.data.shards import ShardReader
from tandem.data.stream import Piece
from tandem.types import UserError


class ExampleStream:
    """Examples whose documents have at most ``longest`` tokens. ``lengths``: of the documents of each shard, in tokens. ``open_shard`` returns
    the reader of a shard by its index. ``each``: consecutive documents of an example."""

    def __init__(
        self, lengths: Sequence[Sequence[int]], open_shard: Callable[[int], ShardReader], *, seed: int, longest: int, each: int = 1
    ) -> None:
        self.seed, self._open_shard, self._each = seed, open_shard, each
        self._kept = [[i for i in range(0, len(shard), each) if max(shard[i : i + each]) <= longest] for shard in lengths]
        self.examples = sum(map(len, self._kept))
        self.left_out = sum(map(len, lengths)) // each - self.examples
        if self.examples == 0:
            raise UserError(f"the dataset has no example of at most {longest} tokens; raise data.sequence_length or name another dataset")
        self._epoch = lru_cache(maxsize=2)(self._epoch_of)
        self._shard = lru_cache(maxsize=4)(self._shard_of)

    def sequence(self, index: int) -> list[Piece]:
        """Returns example ``index`` of the endless order: a piece for each of its documents."""
        epoch, at = divmod(index, self.examples)
        shards, starts = self._epoch(epoch)
        place = bisect_right(starts, at) - 1
        shard = shards[place]
        first = self._shard(epoch, shard)[at - starts[place]]
        reader = self._open_shard(shard)
        return [
            Piece(shard, document, 0, reader.tokens(document, 0, length), reader.learned(document, 0, length), margin=reader.margin(document))
            for document, length in ((i, reader.lengths[i]) for i in range(first, first + self._each))
        ]

    def _epoch_of(self, epoch: int) -> tuple[list[int], list[int]]:
        """Returns the non-empty shards of ``epoch`` in order, and the example of the epoch at which each begins."""
        shards = [i for i, kept in enumerate(self._kept) if kept]
        counter_random("shards", self.seed, epoch).shuffle(shards)
        return shards, list(itertools.accumulate((len(self._kept[i]) for i in shards), initial=0))[:-1]

    def _shard_of(self, epoch: int, shard: int) -> list[int]:
        documents = list(self._kept[shard])
        counter_random("documents", self.seed, epoch, shard).shuffle(documents)
        return documents
