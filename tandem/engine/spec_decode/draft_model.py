"""Guesses from a small model of the same vocabulary, over a cache of its own in the same blocks."""

import torch
from torch import Tensor

from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler import Chunk
from tandem.engine.executor.flat_batch import chunk_batch, span_batch, to_device
from tandem.engine.executor.input_batch import RowTable
from tandem.engine.sample.random_numbers import uniforms
from tandem.kernels.api import KVLayer
from tandem.model.attention import PagedContext
from tandem.model.decoder import Decoder


class DraftModel:
    """``decoder``, packed, guesses for the sequences in the rows of ``table``; ``Sequence.draft_computed`` of their tokens are in its
    cache. What it holds of blocks that were written while nothing was proposed is stale: that costs acceptance and no bit."""

    def __init__(self, decoder: Decoder, caches: list[KVLayer], table: RowTable) -> None:
        self.decoder = decoder
        self.caches = caches
        self._table = table
        self._device = decoder.embed_tokens.device

    def read(self, chunks: tuple[Chunk, ...]) -> None:
        batch = to_device(chunk_batch(self._table, chunks), self._device)
        self.decoder(batch.tokens, batch.positions, PagedContext(batch.paged, self.caches))
        for chunk in chunks:
            for row in chunk.rows:
                if row in self._table.speculating:
                    self._table.speculating[row].draft_computed = chunk.start + len(chunk.tokens)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        table = self._table
        lengths = [int(length) for length in table.length[[s.row for s in sequences]]]
        for sequence, length in zip(sequences, lengths, strict=True):
            # What was guessed wrong lies behind the last token that was drawn, and is computed again.
            sequence.draft_computed = min(sequence.draft_computed, length - 1)
        prompts = [len(sequence.request.prompt_token_ids) for sequence in sequences]
        first = [max(0, s.draft_computed - prompt) for s, prompt in zip(sequences, prompts, strict=True)]
        drawn = [tokens for tokens, _, _ in table.drawn_since(sequences, first)]
        feed = [s.request.prompt_token_ids[s.draft_computed :] + tokens for s, tokens in zip(sequences, drawn, strict=True)]
        guesses: list[list[int]] = [[] for _ in sequences]
        starts = [sequence.draft_computed for sequence in sequences]
        at = list(range(len(sequences)))
        while at:
            tokens = self._draw([sequences[i] for i in at], [feed[i] for i in at], [starts[i] for i in at])
            for i, token in zip(at, tokens, strict=True):
                guesses[i].append(token)
                starts[i] += len(feed[i])
                sequences[i].draft_computed = starts[i]
                feed[i] = [token]
            at = [i for i in at if len(guesses[i]) < counts[i]]
        return guesses

    def _draw(self, sequences: list[Sequence], feed: list[list[int]], starts: list[int]) -> list[int]:
        """The token that follows ``feed[i]`` at position ``starts[i]`` of each sequence, drawn with that position's number."""
        rows = tuple(sequence.row for sequence in sequences)
        batch = to_device(span_batch(self._table, rows, feed, starts), self._device)
        hidden = self.decoder(batch.tokens, batch.positions, PagedContext(batch.paged, self.caches))
        logits = self.decoder.logits(hidden.index_select(0, (batch.paged.query_start[1:] - 1).long()))
        selection = self._table.select(rows)
        ends = torch.tensor([start + len(tokens) for start, tokens in zip(starts, feed, strict=True)])
        uniform = uniforms(selection.random_key, ends)
        settings: list[Tensor] = [selection.temperature, selection.top_k, selection.top_p, selection.min_p, uniform]
        drawn = self.decoder.kernels.sample_rows(logits, *(value.to(self._device) for value in settings))
        tokens: list[int] = drawn.tokens.tolist()
        return tokens
