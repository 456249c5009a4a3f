"""From a decision to flat tensors, through the model, to one token for every row that draws."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.core.scheduler import Decision
from tandem.engine.executor.flat_batch import FlatBatch, add_chunks, advance, decode_batch, empty_batch, span_batch, to_device
from tandem.engine.executor.forward import Computed, forward
from tandem.engine.executor.input_batch import RowTable, Selection
from tandem.engine.executor.ranks import Ranks
from tandem.engine.executor.step_message import encode_step
from tandem.engine.kv_cache.block_copies import Moves, apply_moves
from tandem.engine.lora.adapters import Adapters
from tandem.engine.sample.logits_processors import Position, apply_rules
from tandem.engine.sample.prompt_logprobs import PromptScores
from tandem.engine.sample.random_numbers import top_logprobs, uniforms
from tandem.engine.spec_decode.speculative import Proposer
from tandem.kernels.api import BLOCK_TOKENS, KVLayer, SampledRows
from tandem.model.decoder import Decoder
from tandem.model.lora import LoraBatch
from tandem.types import RunError

StopCheck = Callable[[tuple[int, ...]], list[int]]
"""Asked of rows that have just drawn a token which of them end for a reason that is neither length nor a stop token."""


class Guessed(NamedTuple):
    """Of row ``row`` ``proposed`` tokens were guessed in a step, and the first ``accepted`` were right."""

    row: int
    proposed: int
    accepted: int


class Runner:
    """Runs decisions on ``decoder`` over ``caches``. While nobody joins, leaves or crosses a block, the tensors of the
    last step are kept and moved on by one token. ``host``: the swap space, a layer for each of ``caches`` and of the
    proposer's."""

    def __init__(
        self, decoder: Decoder, caches: list[KVLayer], table: RowTable, adapters: Adapters, ranks: Ranks | None = None,
        host: list[KVLayer] | None = None, proposer: Proposer | None = None,
    ) -> None:
        self.decoder = decoder
        self.adapters = adapters
        self.ranks = ranks
        self.caches = caches
        self.table = table
        self.host = host or []
        self.proposer = proposer
        self.device = decoder.embed_tokens.device
        self.prompt_scores: dict[str, PromptScores] = {}
        """By request: where the log-probabilities of its prompt go, until they are complete."""
        self._selection: Selection | None = None
        self._last: tuple[Selection, FlatBatch] | None = None
        self._numbers: tuple[Selection | None, list[Tensor]] = (None, [])

    @torch.inference_mode()
    def run(self, decision: Decision, ended: list[int], stopped: StopCheck) -> list[Guessed]:
        """Compute one step and draw its tokens into the table; returns what became of guesses.

        Rows that end are added to ``ended`` as they are found, also where the step fails later."""
        moves = Moves(decision.swap_outs, decision.swap_ins, decision.copies)
        apply_moves(self.caches + (self.proposer.caches if self.proposer is not None else []), self.host, moves)
        if decision.changes:
            self.table.change_blocks(decision.changes)
        if not (decision.decode or decision.prefill):
            if self.ranks is not None and any(moves):
                self._forward(moves, empty_batch(self.table), draws=False, scores=False)
            return []
        guesses = self._guesses(decision)
        joined = tuple(row for chunk in decision.prefill for row in chunk.rows)
        selection = self.select(decision.decode, joined)
        batch = self._flat_batch(decision, selection, guesses)
        scores = any(chunk.request_id in self.prompt_scores for chunk in decision.prefill)
        hidden, logits = self._forward(moves, batch, bool(selection.rows), scores)
        if scores:
            self._score_prompts(decision, hidden, len(decision.decode) + sum(map(len, guesses)))
        if decision.prefill and self.proposer is not None:
            self.proposer.read(decision.prefill)
        if logits is None:
            return []
        if guesses:
            return self._draw_guessed(logits, selection, guesses + [[]] * len(joined), ended, stopped)
        self._draw_once(logits, selection, ended, stopped)
        return []

    def _guesses(self, decision: Decision) -> list[list[int]]:
        """What each decoding row feeds as a guess after its last token; empty where nobody guesses."""
        asked = [(i, row, count) for i, (row, count) in enumerate(zip(decision.decode, decision.drafts, strict=False)) if count]
        if self.proposer is None or not asked:
            return []
        found = self.proposer.propose([self.table.speculating[row] for _, row, _ in asked], [count for _, _, count in asked])
        guesses: list[list[int]] = [[] for _ in decision.decode]
        for (i, _, _), tokens in zip(asked, found, strict=True):
            guesses[i] = tokens
        return guesses if any(guesses) else []

    def _draw_once(self, logits: Tensor, selection: Selection, ended: list[int], stopped: StopCheck) -> Tensor:
        """Draw a token for every selected row; returns them on the CPU."""
        drawn = SampledRows(*(values.to("cpu") for values in self._draw(logits, selection)))
        self.take_down(selection, drawn, ended, stopped)
        return drawn.tokens

    def take_down(self, selection: Selection, drawn: SampledRows, ended: list[int], stopped: StopCheck) -> None:
        """Record what every selected row has drawn, which is on the CPU; rows that end by it are added to ``ended``."""
        if not math.isfinite(float(drawn.raw.sum())):
            raise RunError("the model's logits are not finite numbers; check the weights that were loaded last")
        has_ended = self.table.record(selection, *drawn)
        if has_ended.any():
            ended += selection.index[has_ended].tolist()
        ended += stopped(selection.rows)

    def _draw_guessed(
        self, logits: Tensor, selection: Selection, guesses: list[list[int]], ended: list[int], stopped: StopCheck
    ) -> list[Guessed]:
        """As ``_draw_once``, and again for the rows whose guess was the token drawn, as long as there are any.

        Row r's ``len(guesses[r]) + 1`` positions follow one another in ``logits``. Each round draws what a step of its own would,
        so all that ends or bends a completion, or watches it, sees one token at a time."""
        starts, at = [], 0
        for guess in guesses:
            starts.append(at)
            at += len(guess) + 1
        accepted = [0] * len(guesses)
        places = list(range(len(guesses)))
        current = selection
        while True:
            own = torch.tensor([starts[place] + accepted[place] for place in places], device=self.device)
            tokens = self._draw_once(logits.index_select(0, own), current, ended, stopped).tolist()
            over = set(ended)
            more = []
            for place, token in zip(places, tokens, strict=True):
                guess, count = guesses[place], accepted[place]
                if count < len(guess) and guess[count] == token:
                    accepted[place] += 1
                    if selection.rows[place] not in over:
                        more.append(place)
            if not more:
                break
            places, current = more, self.table.narrow(selection, more)
        return [
            Guessed(row, len(guess), count)
            for row, guess, count in zip(selection.rows, guesses, accepted, strict=True) if guess
        ]

    def select(self, decode: tuple[int, ...], joined: tuple[int, ...]) -> Selection:
        """The rows that draw in a step: those that decode, and those that join with it."""
        kept = self._selection
        if kept is None or joined or kept.rows is not decode:
            # The next decision's tuple is another object after a join, so a kept selection is never stale.
            self._selection = kept = self.table.select(decode + joined if joined else decode)
        return kept

    def _flat_batch(self, decision: Decision, selection: Selection, guesses: list[list[int]]) -> FlatBatch:
        is_kept = self._last is not None and self._last[0] is selection
        if is_kept and self._last is not None and not (decision.changes or decision.prefill or guesses):
            return advance(self._last[1], self.table.last_token.index_select(0, selection.index))
        index = selection.index[: len(decision.decode)]
        if guesses:
            last, lengths = self.table.last_token[index].tolist(), self.table.length[index].tolist()
            spans = [[token, *guess] for token, guess in zip(last, guesses, strict=True)]
            batch = span_batch(self.table, decision.decode, spans, [length - 1 for length in lengths])
        else:
            batch = decode_batch(self.table, index)
        if decision.prefill:
            batch = add_chunks(batch, decision.prefill)
        batch = to_device(batch, self.device)
        if self.table.with_adapter or any(chunk.adapter for chunk in decision.prefill):
            batch = batch._replace(lora=self._lora(decision, guesses))
        self._last = None if decision.prefill or guesses else (selection, batch)
        return batch

    def _lora(self, decision: Decision, guesses: list[list[int]]) -> LoraBatch | None:
        adapted, slot = self.table.with_adapter, self.adapters.slot
        slots = []
        for i, row in enumerate(decision.decode):
            own = slot(adapted[row].request.adapter) if row in adapted else -1
            slots += [own] * (1 + (len(guesses[i]) if guesses else 0))
        for chunk in decision.prefill:
            slots += [slot(chunk.adapter) if chunk.adapter else -1] * len(chunk.tokens)
        return self.adapters.batch(slots)

    def _forward(self, moves: Moves, batch: FlatBatch, draws: bool, scores: bool) -> Computed:
        """Compute ``batch`` on every rank; the others make ``moves`` first, which are made here already."""
        own = partial(forward, self.decoder, self.caches, batch, draws, scores)
        if self.ranks is None:
            return own()
        return self.ranks.run("step", {}, own, {"step": encode_step(moves, batch, draws, scores)})

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

    def _score_prompts(self, decision: Decision, hidden: Tensor, start: int) -> None:
        """``start``: where the first chunk stands in ``hidden``."""
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
