"""From a decision to flat tensors, through the model, to one token for every row that draws."""

import math

import torch
from torch import Tensor

from tandem.engine.block_table import BlockCopy
from tandem.engine.flat_batch import FlatBatch, add_chunks, advance, decode_batch, to_device
from tandem.engine.row_table import RowTable, Selection
from tandem.engine.sampling import Adjustment, adjust, top_logprobs, uniforms
from tandem.engine.scheduler import Decision
from tandem.kernels.api import KVLayer, SampledRows
from tandem.model.attention import PagedContext
from tandem.model.decoder import Decoder
from tandem.types import RunError


class Runner:
    """Runs decisions on ``decoder`` over ``caches``. While nobody joins, leaves or crosses a block, the tensors of the
    last step are kept and moved on by one token."""

    def __init__(self, decoder: Decoder, caches: list[KVLayer], table: RowTable) -> None:
        self.decoder = decoder
        self.caches = caches
        self.table = table
        self.device = decoder.embed_tokens.device
        self._selection: Selection | None = None
        self._last: tuple[Selection, FlatBatch] | None = None

    @torch.inference_mode()
    def run(self, decision: Decision) -> list[int]:
        """Compute one step and draw its tokens into the table; returns the rows that ended by length or stop token."""
        if decision.copies:
            self._copy_blocks(decision.copies)
        if decision.changes:
            self.table.change_blocks(decision.changes)
        joined = tuple(row for chunk in decision.prefill for row in chunk.rows)
        selection = self._select(decision.decode, joined)
        batch = self._flat_batch(decision, selection)
        hidden = self.decoder(batch.tokens, batch.positions, PagedContext(batch.paged, self.caches))
        if not selection.rows:
            return []
        logits = self._logits(hidden, batch.logit_rows)
        drawn = self._draw(logits, selection)
        tokens, raw, sampling = (values.to("cpu") for values in drawn)
        if not math.isfinite(float(raw.sum())):
            raise RunError("the model's logits are not finite numbers; check the weights that were loaded last")
        ended = self.table.record(selection, tokens, raw, sampling)
        return selection.index[ended].tolist() if ended.any() else []

    def _select(self, decode: tuple[int, ...], joined: tuple[int, ...]) -> Selection:
        kept = self._selection
        if kept is None or joined or kept.rows is not decode:
            # The next decision's tuple is another object after a join, so a kept selection is never stale.
            self._selection = kept = self.table.select(decode + joined if joined else decode)
        return kept

    def _flat_batch(self, decision: Decision, selection: Selection) -> FlatBatch:
        if self._last is not None and self._last[0] is selection and not (decision.changes or decision.prefill):
            return advance(self._last[1], self.table.last_token.index_select(0, selection.index))
        batch = decode_batch(self.table, selection.index[: len(decision.decode)])
        if decision.prefill:
            batch = add_chunks(batch, decision.prefill)
        batch = to_device(batch, self.device)
        self._last = None if decision.prefill else (selection, batch)
        return batch

    def _logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """[R, V]. The sequences of a group draw from one row, which is computed once."""
        if rows is None:
            return self.decoder.logits(hidden)
        distinct, inverse = torch.unique(rows, return_inverse=True)
        logits = self.decoder.logits(hidden.index_select(0, distinct))
        return logits if len(distinct) == len(rows) else logits.index_select(0, inverse)

    def _draw(self, logits: Tensor, selection: Selection) -> SampledRows:
        table, to = self.table, self.device
        if selection.is_greedy:
            uniform = torch.zeros(len(selection.rows), dtype=torch.float64)
        else:
            uniform = uniforms(selection.random_key, table.length.index_select(0, selection.index))
        adjustments = self._adjustments(selection) if table.adjusted else []
        drawn = self.decoder.kernels.sample_rows(
            adjust(logits, adjustments) if adjustments else logits,
            selection.temperature.to(to),
            selection.top_k.to(to),
            selection.top_p.to(to),
            selection.min_p.to(to),
            uniform.to(to),
        )
        if adjustments:
            drawn = drawn._replace(raw=self.decoder.kernels.logits_logprobs(logits, drawn.tokens))
        if table.with_top_logprobs:
            self._note_top_logprobs(logits, drawn, selection)
        return drawn

    def _adjustments(self, selection: Selection) -> list[Adjustment]:
        found = []
        for i, row in enumerate(selection.rows):
            sequence = self.table.adjusted.get(row)
            if sequence is None:
                continue
            request = sequence.request
            values = dict(request.params.logit_bias or {})
            if int(self.table.length[row]) - len(request.prompt_token_ids) < request.params.min_tokens:
                values |= dict.fromkeys(request.end_token_ids.union(request.stop_token_ids), -math.inf)
            if values:
                found.append(Adjustment(i, list(values), list(values.values())))
        return found

    def _note_top_logprobs(self, logits: Tensor, drawn: SampledRows, selection: Selection) -> None:
        wanted = self.table.with_top_logprobs
        asking = [(i, wanted[row]) for i, row in enumerate(selection.rows) if row in wanted]
        if asking:
            index = torch.tensor([i for i, _ in asking], device=self.device)
            counts = [sequence.request.params.logprobs or 0 for _, sequence in asking]
            found = top_logprobs(logits[index], drawn.tokens[index], drawn.raw[index], counts)
            for (_, sequence), entries in zip(asking, found, strict=True):
                sequence.top_logprobs.append(entries)

    def _copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        sources, targets = torch.tensor(copies, device=self.device).unbind(1)
        for layer in self.caches:
            for tensor in layer.tensors():
                tensor[targets] = tensor[sources]
