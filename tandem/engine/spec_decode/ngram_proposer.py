"""Proposes draft tokens from the sequence itself (prompt lookup)."""

from collections.abc import Iterable

from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler_output import ScheduledPrefill
from tandem.engine.executor.input_batch import InputBatch
from tandem.kernels.api import CacheLayer


class NgramIndex:
    """The tokens of one sequence, and the last position after each n-gram of ``low`` to ``high`` tokens that another token follows."""

    def __init__(self, low: int, high: int) -> None:
        self.tokens: list[int] = []
        self._sizes = range(high, low - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends ``tokens``."""
        for token in tokens:
            end = len(self.tokens)
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self.tokens[end - size :])] = end
            self.tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """Returns the ``count`` tokens that followed the last earlier occurrence of the longest matching n-gram at the end of the sequence; empty
        without a match. Beyond the end of the sequence they repeat periodically, so that loops are predicted."""
        for size in self._sizes:
            end = self._ends.get(tuple(self.tokens[-size:])) if size <= len(self.tokens) else None
            if end is not None:
                known = self.tokens[end : end + count]
                period = len(self.tokens) - end
                return [known[i % period] for i in range(count)]
        return []


class NgramProposer:
    """Proposes draft tokens for the sequences in the rows of ``batch``."""

    def __init__(self, batch: InputBatch, low: int, high: int) -> None:
        self.caches: list[CacheLayer] = []
        self._batch = batch
        self._low, self._high = low, high

    def read(self, chunks: tuple[ScheduledPrefill, ...]) -> None:
        """Does nothing: the tokens of a prompt are indexed when it first decodes."""

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        indices = [self._index(sequence) for sequence in sequences]
        prompts = [len(sequence.request.prompt_token_ids) for sequence in sequences]
        first = [len(index.tokens) - prompt for index, prompt in zip(indices, prompts, strict=True)]
        for index, tokens in zip(indices, self._batch.tokens_since(sequences, first), strict=True):
            index.extend(tokens)
        return [index.propose(count) for index, count in zip(indices, counts, strict=True)]

    def _index(self, sequence: Sequence) -> NgramIndex:
        if sequence.ngrams is None:
            sequence.ngrams = NgramIndex(self._low, self._high)
            sequence.ngrams.extend(sequence.request.prompt_token_ids)
        index: NgramIndex = sequence.ngrams
        return index
