"""Proposes draft tokens with a small head that reads the model's hidden states: multi-token prediction, EAGLE-3."""

from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.core.request import Sequence
from tandem.engine.core.scheduler_output import ScheduledPrefill
from tandem.engine.executor.in_flight_step import DraftOutput
from tandem.engine.executor.input_batch import InputBatch, SelectedRows
from tandem.engine.executor.model_input import ModelInput, prefill_input, span_input
from tandem.engine.kv_cache.cache_tensors import make_cache_of
from tandem.engine.spec_decode.draw_drafts import draw_drafts
from tandem.engine.spec_decode.unread_states import Span, UnreadStates
from tandem.kernels.api import CacheLayer, Kernels
from tandem.kernels.mixed import activation_dtype
from tandem.layout.shapes import ModelShapes
from tandem.model.attention import PagedContext


class DraftHead(Protocol):
    """A head with its own layer and KV cache. At position i it reads the model's state of position i and the token at i + 1, and its own state there predicts
    the token at i + 2, or, in the place of the model's state, the one after that."""

    kernels: Kernels
    shapes: ModelShapes
    """Of its one layer."""
    dtype: torch.dtype
    state_layers: tuple[int, ...]
    """The layers of the model whose inputs, side by side, are the states that it reads; empty: the hidden states after the final norm."""

    def use_context(self, tokens: int) -> None:
        """Computes from now on sequences of up to ``tokens`` tokens, as ``Decoder.use_context``."""
        ...

    def combined(self, states: Tensor) -> Tensor:
        """Returns the model's ``states[T, W]`` as ``compute`` reads them, [T, H]."""
        ...

    def compute(self, tokens: Tensor, states: Tensor, positions: Tensor, context: PagedContext) -> Tensor:
        """Returns its own states [T, H], or of the rows that ``context`` wants, from ``tokens[T]`` and ``states[T, H]`` at ``positions[T]``."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Returns the logits [R, V] over the model's vocabulary of its own ``states[R, H]``."""
        ...


class StateProposer:
    """Proposes draft tokens for the sequences in the rows of ``batch`` with ``head``, which reads what the model's steps have computed, so that nothing is
    computed twice. ``most_rows``: above this number of decoding sequences no states are kept.

    A row of its cache belongs to the position of the model's state, and the token after it: the last row of a cached prefix may be of another sequence, and
    rows of steps whose states were not kept are empty. Both affect acceptance and no output.
    """

    def __init__(self, head: DraftHead, batch: InputBatch, blocks: int, most_rows: int) -> None:
        self.head = head
        self.caches: list[CacheLayer] = []
        self._batch, self._most_rows = batch, most_rows
        self._device = batch.on_device.device
        self._pending: tuple[str, int, Tensor] | None = None
        """Of the prompt that is not complete, of which the scheduler has one at a time: its request, the position whose next token is not known yet, and the
        state [1, W] there."""
        self.allocate(blocks)

    def allocate(self, blocks: int) -> None:
        """Allocates its KV cache."""
        self.caches = make_cache_of(self.head.shapes, blocks, activation_dtype(self.head.kernels, self.head.dtype), self._device)

    def read(self, chunks: tuple[ScheduledPrefill, ...]) -> None:
        """Reads nothing: the states of a prefill come with ``read_states``."""

    def read_states(self, chunks: tuple[ScheduledPrefill, ...], states: Tensor) -> None:
        """Reads the tokens of ``chunks`` and their ``states[T, W]``, one chunk after the other."""
        shifted: list[ScheduledPrefill] = []
        read: list[Tensor] = []
        at = 0
        for chunk in chunks:
            own, at = states[at : at + len(chunk.tokens)], at + len(chunk.tokens)
            pending, self._pending = self._pending, None
            if pending is not None and pending[:2] == (chunk.request_id, chunk.start - 1):
                shifted.append(chunk._replace(start=chunk.start - 1, rows=()))
                read += [pending[2], own[:-1]]
            elif len(chunk.tokens) > 1:
                shifted.append(chunk._replace(tokens=chunk.tokens[1:], rows=()))
                read.append(own[:-1])
            end = chunk.start + len(chunk.tokens)
            last = own[-1:].clone()
            if not chunk.rows:
                self._pending = (chunk.request_id, end - 1, last)
            for row in chunk.rows:
                if row in self._batch.speculating:
                    self._batch.speculating[row].unread_states = unread = UnreadStates()
                    unread.add(end - 1, last, 0, 1)
        if shifted:
            self._compute(prefill_input(tuple(shifted), self._device), self.head.combined(torch.cat(read)))

    def keeps(self, rows: int) -> bool:
        """Returns whether the states of a step of ``rows`` decoding sequences are kept."""
        return rows <= self._most_rows and bool(self._batch.speculating)

    def keep(self, selected: SelectedRows, positions: list[int], states: Tensor, drafts: list[list[int]], verified: list[DraftOutput]) -> None:
        """Keeps the ``states`` of the accepted tokens of a step, in which row i of ``selected`` fed the token at ``positions[i]`` and ``drafts[i]``, of which
        those of ``verified`` were accepted."""
        accepted = {output.row: output.num_accepted for output in verified}
        at = 0
        for i, position in enumerate(positions):
            sequence = selected.sequences[i]
            if sequence.request.draft_tokens:
                sequence.unread_states = sequence.unread_states or UnreadStates()
                sequence.unread_states.add(position, states, at, 1 + accepted.get(selected.rows[i], 0))
            at += 1 + (len(drafts[i]) if drafts else 0)

    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        lengths = self._batch.host.lengths_of([sequence.row for sequence in sequences])
        # Without the state before the last token, as after a step whose states were not kept, it has nothing to start from.
        at = [i for i, s in enumerate(sequences) if s.unread_states is not None and s.unread_states.holds(lengths[i] - 2)]
        if not at:
            return drafts
        taken = [(sequences[i], span) for i in at for span in sequences[i].unread_states.take()]
        newest = [place for place, (sequence, span) in enumerate(taken) if span.end == sequence.unread_states.end]
        older = [each for place, each in enumerate(taken) if place not in newest]
        if older:
            # What it computes at these positions is not needed, only their keys and values.
            self._read(older)
        feed, starts, states = self._spans([taken[place] for place in newest])
        while at:
            selected = self._batch.select(tuple(sequences[i].row for i in at))
            states = self._compute(span_input(self._batch.on_device, selected.index, feed, starts), states)
            ends = [start + len(tokens) for start, tokens in zip(starts, feed, strict=True)]
            tokens = draw_drafts(self.head.kernels, self.head.logits(states), selected, [end + 1 for end in ends])
            for i, token in zip(at, tokens, strict=True):
                drafts[i].append(token)
            left = [place for place, i in enumerate(at) if len(drafts[i]) < counts[i]]
            states = states if len(left) == len(at) else states[left]
            at, starts, feed = [at[place] for place in left], [ends[place] for place in left], [[tokens[place]] for place in left]
        return drafts

    def _spans(self, spans: list[tuple[Sequence, Span]]) -> tuple[list[list[int]], list[int], Tensor]:
        """Returns what the head reads in ``spans``: the tokens after their positions, their first positions, and their states one after the other [T, H]."""
        firsts = [span.first + 1 - len(sequence.request.prompt_token_ids) for sequence, span in spans]
        tokens = self._batch.tokens_since([sequence for sequence, _ in spans], firsts)
        feed = [known[: len(span.states)] for known, (_, span) in zip(tokens, spans, strict=True)]
        return feed, [span.first for _, span in spans], self.head.combined(torch.cat([span.states for _, span in spans]))

    def _read(self, spans: list[tuple[Sequence, Span]]) -> None:
        feed, starts, states = self._spans(spans)
        self._compute(span_input(self._batch.on_device, torch.tensor([sequence.row for sequence, _ in spans]), feed, starts), states)

    def _compute(self, batch: ModelInput, states: Tensor) -> Tensor:
        """Returns the head's states [R, H] of the last token of each sequence of ``batch``."""
        last = (batch.paged.query_start[1:] - 1).long()
        return self.head.compute(batch.tokens, states, batch.positions, PagedContext(batch.paged, self.caches, last))
