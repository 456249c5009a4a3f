"""The endless order of a tokenized dataset: sequence ``i`` is a function of (dataset, seed, length, i) alone.

Every epoch shuffles the shards and the documents of each shard. The documents are concatenated and split every ``length`` tokens. The only
cursor of a run is the number of sequences it has read, so a run resumes with any number of ranks without losing or repeating a token.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from tandem.data.counter import counter_random
from tandem.data.shards import ShardReader
from tandem.data.tokenizing.tokenize import TokenizedDataset
from tandem.types import UserError


class Piece(NamedTuple):
    """Consecutive tokens of one document in a sequence, from token ``start`` of the document. ``learned``: 1 for each learned token
    (``None``: all). ``reference``: the reference's log-probability (nats) of each learned token, 0 elsewhere (``None``: there is none). ``margin``: of
    the preference pair that it belongs to."""

    shard: int
    document: int
    start: int
    tokens: "memoryview[int]"
    learned: "memoryview[int] | None" = None
    reference: "memoryview[float] | None" = None
    margin: float = 0.0


Sequence = list[Piece]
"""Pieces with ``length`` tokens in total. Attention treats each as a separate document."""


class TokenStream:
    """Sequences of ``length`` tokens from ``dataset``; ``open_shard`` returns the reader of a shard by its index."""

    def __init__(self, dataset: TokenizedDataset, open_shard: Callable[[int], ShardReader], *, seed: int, length: int) -> None:
        if length < 2:
            raise UserError(f"the length of a training sequence is {length} tokens; it must be at least 2, the first predicts the second")
        if dataset.tokens == 0:
            raise UserError("the dataset has no tokens; tokenize a source that contains text")
        self.dataset, self.seed, self.length = dataset, seed, length
        self._open_shard = open_shard
        self._epoch = lru_cache(maxsize=2)(self._epoch_of)
        self._shard = lru_cache(maxsize=4)(self._shard_of)

    def sequence(self, index: int) -> Sequence:
        """Returns the tokens from ``index * length`` of the endless stream."""
        at, missing = index * self.length, self.length
        pieces = []
        while missing:
            piece = self._piece(at, missing)
            pieces.append(piece)
            at += len(piece.tokens)
            missing -= len(piece.tokens)
        return pieces

    def _piece(self, at: int, most: int) -> Piece:
        """Returns the part of one document that begins at token ``at`` of the stream, at most ``most`` tokens."""
        epoch, at = divmod(at, self.dataset.tokens)
        shards, shard_starts = self._epoch(epoch)
        place = bisect_right(shard_starts, at) - 1
        documents, starts, reader = self._shard(epoch, shards[place])
        at -= shard_starts[place]
        nth = bisect_right(starts, at) - 1
        start, document = at - starts[nth], documents[nth]
        stop = min(start + most, reader.lengths[document])
        return Piece(shards[place], document, start, reader.tokens(document, start, stop))

    def _epoch_of(self, epoch: int) -> tuple[list[int], list[int]]:
        """Returns the non-empty shards of ``epoch`` in order, and the token of the epoch at which each begins."""
        shards = [i for i, shard in enumerate(self.dataset.shards) if shard.tokens]
        counter_random("shards", self.seed, epoch).shuffle(shards)
        return shards, _starts([self.dataset.shards[i].tokens for i in shards])

    def _shard_of(self, epoch: int, shard: int) -> tuple[list[int], list[int], ShardReader]:
        reader = self._open_shard(shard)
        documents = [i for i, length in enumerate(reader.lengths) if length]
        counter_random("documents", self.seed, epoch, shard).shuffle(documents)
        return documents, _starts([reader.lengths[i] for i in documents]), reader


def _starts(lengths: list[int]) -> list[int]:
    return list(itertools.accumulate(lengths, initial=0))[:-1]
