"""Proposes draft tokens with a small model of the same vocabulary, which has a separate KV cache with the same block tables."""

from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler_output import ScheduledPrefill
from tandem.engine.executor.input_batch import InputBatch
from tandem.engine.executor.model_input import prefill_input, span_input
from tandem.engine.kv_cache.cache_tensors import make_cache
from tandem.engine.spec_decode.draw_drafts import draw_drafts
from tandem.kernels.api import CacheLayer
from tandem.model.attention import PagedContext
from tandem.model.decoder import Decoder


class DraftModel:
    """Proposes draft tokens for the sequences in the rows of ``batch`` with ``decoder``, packed. ``Sequence.draft_computed``: tokens of a
    sequence in its cache. Blocks that were written while nothing was proposed are stale here, which affects acceptance and no output."""

    def __init__(self, decoder: Decoder, blocks: int, batch: InputBatch) -> None:
        self.decoder = decoder
        self.caches: list[CacheLayer] = []
        self._batch = batch
        self._device = decoder.embed_tokens.device
        self.allocate(blocks)

    def allocate(self, blocks: int) -> None:
        """Allocates its KV cache."""
        self.caches = make_cache(self.decoder, blocks)

    def read(self, chunks: tuple[ScheduledPrefill, ...]) -> None:
        """Computes the keys and values of a prefill."""
        batch = prefill_input(chunks, self._device)
        self.decoder(batch.tokens, batch.positions, PagedContext(batch.paged, self.caches))
        for chunk in chunks:
            for row in chunk.rows:
                if row in self._batch.speculating:
                    self._batch.speculating[row].draft_computed = chunk.start + len(chunk.tokens)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        input_batch = self._batch
        lengths = input_batch.host.lengths_of([sequence.row for sequence in sequences])
        for sequence, length in zip(sequences, lengths, strict=True):
            # Keys and values of rejected draft tokens are recomputed.
            sequence.draft_computed = min(sequence.draft_computed, length - 1)
        prompts = [len(sequence.request.prompt_token_ids) for sequence in sequences]
        first = [max(0, s.draft_computed - prompt) for s, prompt in zip(sequences, prompts, strict=True)]
        drawn = input_batch.tokens_since(sequences, first)
        feed = [s.request.prompt_token_ids[s.draft_computed :] + tokens for s, tokens in zip(sequences, drawn, strict=True)]
        drafts: list[list[int]] = [[] for _ in sequences]
        starts = [sequence.draft_computed for sequence in sequences]
        at = list(range(len(sequences)))
        while at:
            tokens = self._draw([sequences[i] for i in at], [feed[i] for i in at], [starts[i] for i in at])
            for i, token in zip(at, tokens, strict=True):
                drafts[i].append(token)
                starts[i] += len(feed[i])
                sequences[i].draft_computed = starts[i]
                feed[i] = [token]
            at = [i for i in at if len(drafts[i]) < counts[i]]
        return drafts

    def _draw(self, sequences: list[Sequence], feed: list[list[int]], starts: list[int]) -> list[int]:
        """Returns the token that follows ``feed[i]`` at position ``starts[i]`` of each sequence, drawn with that position's number."""
        selected = self._batch.select(tuple(sequence.row for sequence in sequences))
        batch = span_input(self._batch.on_device, selected.index, feed, starts)
        hidden = self.decoder(batch.tokens, batch.positions, PagedContext(batch.paged, self.caches))
        logits = self.decoder.logits(hidden.index_select(0, (batch.paged.query_start[1:] - 1).long()))
        return draw_drafts(self.decoder.kernels, logits, selected, [start + len(tokens) for start, tokens in zip(starts, feed, strict=True)])
