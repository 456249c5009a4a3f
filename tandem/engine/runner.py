"""From a decision to flat tensors, through the model, to one token for every row that draws."""

import math
from functools import partial

import torch
from torch import Tensor

from tandem.engine.adapters import Adapters
from tandem.engine.block_table import BlockCopy
from tandem.engine.flat_batch import FlatBatch, add_chunks, advance, decode_batch, to_device
from tandem.engine.forward import Computed, forward
from tandem.engine.logit_rules import Position, apply_rules
from tandem.engine.prompt_scores import PromptScores
from tandem.engine.ranks import Ranks
from tandem.engine.row_table import RowTable, Selection
from tandem.engine.sampling import top_logprobs, uniforms
from tandem.engine.scheduler import Decision
from tandem.engine.step_message import encode_step
from tandem.kernels.api import BLOCK_TOKENS, KVLayer, SampledRows
from tandem.model.decoder import Decoder
from tandem.model.lora import LoraBatch
from tandem.types import RunError


class Runner:
    """Runs decisions on ``decoder`` over ``caches``. While nobody joins, leaves or crosses a block, the tensors of the
    last step are kept and moved on by one token."""

    def __init__(
        self, decoder: Decoder, caches: list[KVLayer], table: RowTable, adapters: Adapters, ranks: Ranks | None = None
    ) -> None:
        self.decoder = decoder
        self.adapters = adapters
        self.ranks = ranks
        self.caches = caches
        self.table = table
        self.device = decoder.embed_tokens.device
        self.prompt_scores: dict[str, PromptScores] = {}
        """By request: where the log-probabilities of its prompt go, until they are complete."""
        self._selection: Selection | None = None
        self._last: tuple[Selection, FlatBatch] | None = None
        self._numbers: tuple[Selection | None, list[Tensor]] = (None, [])

    @torch.inference_mode()
    def run(self, decision: Decision) -> list[int]:
        """Compute one step and draw its tokens into the table; returns the rows that ended by length or stop token."""
        if decision.changes:
            self.table.change_blocks(decision.changes)
        joined = tuple(row for chunk in decision.prefill for row in chunk.rows)
        selection = self._select(decision.decode, joined)
        batch = self._flat_batch(decision, selection)
        scores = any(chunk.request_id in self.prompt_scores for chunk in decision.prefill)
        hidden, logits = self._forward(decision.copies, batch, bool(selection.rows), scores)
        if scores:
            self._score_prompts(decision, hidden)
        if logits is None:
            return []
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
        if self.table.with_adapter or any(chunk.adapter for chunk in decision.prefill):
            batch = batch._replace(lora=self._lora(decision))
        self._last = None if decision.prefill else (selection, batch)
        return batch

    def _lora(self, decision: Decision) -> LoraBatch | None:
        adapted, slot = self.table.with_adapter, self.adapters.slot
        slots = [slot(adapted[row].request.adapter) if row in adapted else -1 for row in decision.decode]
        for chunk in decision.prefill:
            slots += [slot(chunk.adapter) if chunk.adapter else -1] * len(chunk.tokens)
        return self.adapters.batch(slots)

    def _forward(self, copies: tuple[BlockCopy, ...], batch: FlatBatch, draws: bool, scores: bool) -> Computed:
        own = partial(forward, self.decoder, self.caches, copies, batch, draws, scores)
        if self.ranks is None:
            return own()
        return self.ranks.run("step", {}, own, {"step": encode_step(copies, batch, draws, scores)})

    def _draw(self, logits: Tensor, selection: Selection) -> SampledRows:
        table, to = self.table, self.device
        uniform = self._uniforms(selection)
        positions = self._positions(selection) if table.adjusted else []
        drawn = self.decoder.kernels.sample_rows(
            apply_rules(logits, positions) if positions else logits,
            selection.temperature.to(to),
            selection.top_k.to(to),
            selection.top_p.to(to),
            selection.min_p.to(to),
            uniform.to(to),
        )
        if positions:
            drawn = drawn._replace(raw=self.decoder.kernels.logits_logprobs(logits, drawn.tokens))
        if table.with_top_logprobs:
            self._note_top_logprobs(logits, drawn, selection)
        return drawn

    def _uniforms(self, selection: Selection) -> Tensor:
        """The number of each row at its position. A kept selection takes them from a block of positions at a time."""
        if selection.is_greedy:
            return torch.zeros(len(selection.rows), dtype=torch.float64)
        kept, ahead = self._numbers
        if kept is not selection or not ahead:
            positions = self.table.length.index_select(0, selection.index) + torch.arange(BLOCK_TOKENS).unsqueeze(1)
            ahead = list(uniforms(selection.random_key, positions))
            self._numbers = (selection, ahead)
        return ahead.pop(0)

    def _positions(self, selection: Selection) -> list[Position]:
        """Where the selected rows with rules stand."""
        adjusted = self.table.adjusted
        found = [(i, adjusted[row]) for i, row in enumerate(selection.rows) if row in adjusted]
        outputs = self.table.outputs_of([sequence for _, sequence in found]) if found else []
        return [
            Position(i, sequence.request.rules, sequence.cursor, output)
            for (i, sequence), output in zip(found, outputs, strict=True)
            if sequence.request.rules is not None
        ]

    def _logits(self, hidden: Tensor, first: int, last: int) -> Tensor:
        """Logits of rows ``first .. last - 1`` of the step."""
        own = partial(self.decoder.logits, hidden[first:last])
        return own() if self.ranks is None else self.ranks.run("logits", {"first": first, "last": last}, own)

    def _score_prompts(self, decision: Decision, hidden: Tensor) -> None:
        start = len(decision.decode)
        for chunk in decision.prefill:
            scores = self.prompt_scores.get(chunk.request_id)
            if scores is not None:
                scores.note(partial(self._logits, hidden), self.decoder, start, len(chunk.tokens), chunk.start)
                if scores.is_complete:
                    del self.prompt_scores[chunk.request_id]
            start += len(chunk.tokens)

    def _note_top_logprobs(self, logits: Tensor, drawn: SampledRows, selection: Selection) -> None:
        wanted = self.table.with_top_logprobs
        asking = [(i, wanted[row]) for i, row in enumerate(selection.rows) if row in wanted]
        if asking:
            index = torch.tensor([i for i, _ in asking], device=self.device)
            counts = [sequence.request.params.logprobs or 0 for _, sequence in asking]
            found = top_logprobs(logits[index], drawn.tokens[index], drawn.raw[index], counts)
            for (_, sequence), entries in zip(asking, found, strict=True):
                sequence.top_logprobs.append(entries)
