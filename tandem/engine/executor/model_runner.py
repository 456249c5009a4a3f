"""The model runner: executes a scheduler output and samples one token for every row that draws."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from tandem.engine.core.request import Request
from tandem.engine.core.scheduler_output import SchedulerOutput
from tandem.engine.executor.cuda_graphs import Bucket, DecodeGraphs, Replay
from tandem.engine.executor.forward import Computed, forward
from tandem.engine.executor.in_flight_step import DraftOutput, InFlightStep, to_host
from tandem.engine.executor.input_batch import InputBatch, SelectedRows, check_finite
from tandem.engine.executor.model_input import ModelInput, add_prefills, advance, decode_input, empty_input, span_input
from tandem.engine.executor.ranks import Ranks
from tandem.engine.executor.row_tensors import to_device
from tandem.engine.executor.step_message import encode_step
from tandem.engine.kv_cache.block_pool import BlockCopy
from tandem.engine.kv_cache.cache_tensors import Moves, apply_moves, host_pool
from tandem.engine.lora.adapters import Adapters
from tandem.engine.pooling.pooler import PooledStates, Pooler
from tandem.engine.sample.logprobs import PromptLogprobs
from tandem.engine.sample.random_numbers import uniforms
from tandem.engine.sample.sampler import Sampler, SamplingMetadata
from tandem.engine.spec_decode.speculative import Proposer
from tandem.engine.spec_decode.state_proposer import StateProposer
from tandem.kernels.api import BLOCK_TOKENS, CacheLayer, KVLayer, SampledRows
from tandem.kernels.dense_layers import LayerInputs
from tandem.model.aux_hidden_states import AuxHiddenStates
from tandem.model.decoder import Decoder
from tandem.model.lora import LoraBatch

StopCheck = Callable[[tuple[int, ...], Tensor], list[int]]
"""Maps rows that have just drawn a token, and these tokens [R] on the CPU, to those that end for a reason other than length or a stop token."""


class ModelRunner:
    """Executes scheduler outputs on ``decoder`` over ``caches``.

    ``execute_model`` launches a step; ``synchronize`` waits for it and records its tokens. A step may be launched before the previous one is
    synchronized: the tokens stay on the device in between. A row that proves to have ended is then computed once more, in a block that it
    still holds, and the result is dropped; steps run in launch order, so the next owner of that block writes after it.

    While no sequence joins, leaves or enters another block, the input of the last step is kept and advanced by one token. ``host``: the swap
    space, a layer for each of ``caches`` and of the proposer's. ``pooler``: of a model that embeds or scores texts. ``draft_rows``: rows
    for the states of linear attention after each draft token of a step. ``graphs``: replays steps in which every row only decodes.
    """

    def __init__(
        self, decoder: Decoder, caches: list[CacheLayer], batch: InputBatch, adapters: Adapters, ranks: Ranks | None = None,
        host: list[CacheLayer] | None = None, proposer: Proposer | None = None, pooler: Pooler | None = None, draft_rows: range = range(0),
    ) -> None:
        self.decoder = decoder
        self.adapters = adapters
        self.ranks = ranks
        self.caches = caches
        self.batch = batch
        self.host = host or []
        self.proposer = proposer
        self._reader = proposer if isinstance(proposer, StateProposer) else None
        self.pooler = pooler
        self._draft_rows = draft_rows
        self.sampler = Sampler(decoder.kernels)
        self.device = decoder.embed_tokens.device
        self.graphs: DecodeGraphs | None = None
        self.prompt_logprobs: dict[str, PromptLogprobs] = {}
        """The prompt log-probabilities that are being collected, by request id."""
        self.pooled: dict[str, PooledStates] = {}
        """What pooling requests have so far, by request id."""
        self._state_copies: list[BlockCopy] = []
        """The next step's copies of states that this one has asked for: from a prompt's row to those of further samples, and from an accepted draft token's."""
        self._selected: SelectedRows | None = None
        self._last: tuple[SelectedRows, ModelInput] | None = None
        self._uniforms: tuple[SelectedRows | None, list[Tensor]] = (None, [])
        self._decode_rows = None if ranks is not None or batch.is_mirrored else batch.host.decode_rows
        batch.use_recorder(decoder.kernels)

    # -- one step ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput) -> InFlightStep:
        """Launches one step. The rows that join with it must be in the batch already."""
        moves = Moves(output.swap_outs, output.swap_ins, output.block_copies, tuple(self._state_copies), *output.state_copies)
        self._state_copies.clear()
        apply_moves(self._all_caches, self.host, moves)
        self.batch.update(output.block_changes, output.joined_rows + output.resumed_rows)
        if not (output.decode_rows or output.prefills):
            if self.ranks is not None and any(moves):
                self._forward(moves, empty_input(self.device), draws=False, scores=False)
            return InFlightStep(output)
        drafts = self._propose_drafts(output)
        selected = self._select(output)
        reader, keeps = self._reader, self._reader is not None and self._reader.keeps(len(output.decode_rows))
        if not (output.prefills or drafts or self.batch.needs_host):
            decoded = self._decode_at_once(selected, keeps)
            if decoded is not None:
                self._last, self._uniforms = None, (None, [])
                return InFlightStep(output, selected, *to_host(decoded[0]), states=decoded[1])
        model_input = self._prepare_inputs(output, selected, drafts)
        scores = any(chunk.request_id in self.prompt_logprobs or chunk.request_id in self.pooled for chunk in output.prefills)
        aux = AuxHiddenStates(reader.head.state_layers) if reader is not None and reader.head.state_layers and (keeps or output.prefills) else None
        needs_all = scores or (bool(output.prefills) and reader is not None and aux is None)
        hidden, logits = self._forward(moves, model_input, bool(selected.rows), needs_all, aux)
        self._state_copies += [BlockCopy(chunk.state_row, row) for chunk in output.prefills for row in chunk.rows[1:]]
        fed = len(output.decode_rows) + sum(map(len, drafts))
        if scores:
            self._score_prompts(output, hidden, fed)
        states = None
        if reader is not None and (keeps or output.prefills):
            computed = hidden if aux is None else torch.cat(aux.states, dim=1)
            if output.prefills:
                reader.read_states(output.prefills, computed[fed:])
            states = computed[:fed] if keeps else None
        elif output.prefills and self.proposer is not None:
            self.proposer.read(output.prefills)
        if logits is None:
            return InFlightStep(output)
        if drafts:
            return InFlightStep(output, selected, logits=logits, drafts=drafts + [[]] * (len(selected.rows) - len(drafts)), states=states)
        return InFlightStep(output, selected, *to_host(self._sample(logits, selected)), states=states)

    @torch.inference_mode()
    def synchronize(self, step: InFlightStep, ended: list[int], stopped: StopCheck) -> list[DraftOutput]:
        """Waits for ``step`` and records the tokens it drew; returns how many draft tokens were accepted. Adds each row that ends to ``ended``
        at once, so that ``ended`` is valid even if the call fails later."""
        selected = step.selected
        if selected is None:
            return []
        if step.states is None or self._reader is None:
            verified = self._verify(step, selected, ended, stopped)
            self._restore_states(step, verified)
            return verified
        positions = [length - 1 for length in self.batch.host.lengths_of(selected.rows[: len(step.output.decode_rows)])]
        verified = self._verify(step, selected, ended, stopped)
        self._restore_states(step, verified)
        self._reader.keep(selected, positions, step.states, step.drafts or [], verified)
        return verified

    def _verify(self, step: InFlightStep, selected: SelectedRows, ended: list[int], stopped: StopCheck) -> list[DraftOutput]:
        sampled = step.sampled
        if step.drafts is not None and step.logits is not None:
            is_stepwise = any(row in special for special in (self.batch.with_logits_processors, self.batch.with_top_logprobs) for row in selected.rows)
            verify = self._verify_stepwise if is_stepwise else self._verify_drafts
            return verify(step.logits, selected, step.drafts, ended, stopped)
        assert sampled is not None
        if step.done is not None:
            step.done.synchronize()
        held = self._held(selected)
        if len(held) < len(selected.rows):
            # The rows that left ended in the previous step.
            if not held:
                return []
            selected = self.batch.narrow(selected, held)
            places = torch.tensor(held)
            sampled = SampledRows(*(values.index_select(0, places) for values in sampled))
        self._record(selected, sampled, ended, stopped)
        return []

    def _held(self, selected: SelectedRows) -> Sequence[int]:
        """Returns the places of the selected rows whose sequences still have them. Without steps launched ahead none can have left its row."""
        if not self.batch.is_mirrored:
            return range(len(selected.rows))
        return [place for place, (row, sequence) in enumerate(zip(selected.rows, selected.sequences, strict=True)) if sequence.row == row]

    def _restore_states(self, step: InFlightStep, verified: list[DraftOutput]) -> None:
        """Lets the rows whose draft tokens were rejected go on from their states after the last accepted one."""
        if not self._draft_rows or not step.drafts or step.selected is None:
            return
        accepted, at = {row: count for row, _, count in verified}, 0
        for row, draft in zip(step.selected.rows, step.drafts, strict=True):
            if draft and accepted[row] < len(draft):
                self._state_copies.append(BlockCopy(self._draft_rows[at + accepted[row]], row))
            at += len(draft)

    def _decode_at_once(self, selected: SelectedRows, keeps_states: bool) -> tuple[SampledRows, Tensor | None] | None:
        """Draws the next token of each selected row by a graph, or by one call of the kernels; ``None`` where there is neither. ``keeps_states``: returns the
        states [R, W] that the draft head reads too."""
        if self.graphs is not None:
            return self.graphs.run(selected.device_index, self.batch.width(selected.index)), None
        program = None if self._decode_rows is None else self.decoder.decode_program(self._decode_rows)
        if program is None or len(selected.rows) > program.most_rows:
            return None
        states = None
        if keeps_states and self._reader is not None:
            layers = self._reader.head.state_layers
            states = LayerInputs(layers, torch.empty(len(selected.rows), max(1, len(layers)) * self.decoder.shapes.hidden_size, dtype=torch.float32))
        return program.run(cast("list[KVLayer]", self.caches), selected.index, states), None if states is None else states.to

    def decode(self, index: Tensor, width: int) -> SampledRows:
        """Computes a step in which each of the rows ``index[R]`` feeds one token. Never waits for the device, so that a graph can capture it."""
        rows = self.batch.on_device
        computed = forward(self.decoder, self.caches, decode_input(rows, index, width), draws=True, scores=False)
        assert computed.logits is not None
        sampled = self.sampler(computed.logits, rows.sampling_metadata(index))
        rows.append(index, sampled.tokens)
        return sampled

    def make_graphs(self, capture: Callable[[Replay], Replay] | None = None) -> DecodeGraphs:
        """Enables graphs for decoding steps, for a batch with a padding row. ``capture``: as in ``DecodeGraphs``."""
        rows = self.batch.on_device
        most = Bucket(rows.padding, rows.block_tables.shape[1])
        self.graphs = DecodeGraphs(self.decode, rows.padding, most, self.device, lambda: (*self.decoder.packed, self.caches), capture)
        return self.graphs

    # -- the input -----------------------------------------------------------------------------------------------------

    def _select(self, output: SchedulerOutput) -> SelectedRows:
        """Returns the rows that draw: those that decode, and those that join with this step."""
        kept, joined = self._selected, output.joined_rows
        if kept is None or joined or kept.rows is not output.decode_rows:
            # After a join the next step has a new tuple of rows, so a kept selection is never stale.
            self._selected = kept = self.batch.select(output.decode_rows + joined if joined else output.decode_rows)
        return kept

    def _prepare_inputs(self, output: SchedulerOutput, selected: SelectedRows, drafts: list[list[int]]) -> ModelInput:
        rows, last = self.batch.on_device, self._last
        is_kept = last is not None and last[0] is selected
        if is_kept and last is not None and not (output.block_changes or output.prefills or drafts):
            return advance(last[1], rows.last_token.index_select(0, selected.device_index))
        count = len(output.decode_rows)
        if drafts:
            index, host = selected.index[:count], self.batch.host
            fed, lengths = host.last_token[index].tolist(), host.lengths_of(selected.rows[:count])
            spans = [[token, *draft] for token, draft in zip(fed, drafts, strict=True)]
            model_input = span_input(rows, index, spans, [length - 1 for length in lengths], self._draft_rows)
        else:
            model_input = decode_input(rows, selected.device_index[:count], self.batch.width(selected.index[:count]))
        if output.prefills:
            model_input = add_prefills(model_input, output.prefills)
        if self.batch.with_adapter or any(chunk.adapter for chunk in output.prefills):
            model_input = model_input._replace(lora=self._lora(output, drafts))
        self._last = None if output.prefills or drafts else (selected, model_input)
        return model_input

    def _propose_drafts(self, output: SchedulerOutput) -> list[list[int]]:
        """Returns the draft tokens that each decoding row feeds after its last token; empty if no row has any."""
        drafting = [(i, row, count) for i, (row, count) in enumerate(zip(output.decode_rows, output.num_draft_tokens, strict=False)) if count]
        if self.proposer is None or not drafting:
            return []
        proposed = self.proposer.propose([self.batch.speculating[row] for _, row, _ in drafting], [count for _, _, count in drafting])
        drafts: list[list[int]] = [[] for _ in output.decode_rows]
        for (i, _, _), tokens in zip(drafting, proposed, strict=True):
            drafts[i] = tokens
        return drafts if any(drafts) else []

    def _lora(self, output: SchedulerOutput, drafts: list[list[int]]) -> LoraBatch | None:
        adapted, slot = self.batch.with_adapter, self.adapters.slot
        slots = []
        for i, row in enumerate(output.decode_rows):
            adapter_slot = slot(adapted[row].request.adapter) if row in adapted else -1
            slots += [adapter_slot] * (1 + (len(drafts[i]) if drafts else 0))
        for chunk in output.prefills:
            slots += [slot(chunk.adapter) if chunk.adapter else -1] * len(chunk.tokens)
        return self.adapters.batch(slots)

    def _forward(self, moves: Moves, model_input: ModelInput, draws: bool, scores: bool, aux: AuxHiddenStates | None = None) -> Computed:
        """Computes ``model_input`` on every rank. The other ranks make ``moves`` first; this rank has made them already, and alone fills ``aux``."""
        own = partial(forward, self.decoder, self.caches, model_input, draws, scores, aux)
        if self.ranks is None:
            return own()
        meta, blobs = encode_step(moves, model_input, draws, scores)
        return self.ranks.run("step", meta, own, blobs)

    # -- the tokens ----------------------------------------------------------------------------------------------------

    def _sample(self, logits: Tensor, selected: SelectedRows) -> SampledRows:
        """Draws a token for every selected row from ``logits[R, V]`` and appends it to the rows on the device."""
        positions = self.batch.positions_to_process(selected)
        metadata = SamplingMetadata(selected.temperature, selected.top_k, selected.top_p, selected.min_p, self._next_uniforms(selected))
        sampled = self.sampler(logits, metadata, positions)
        self.batch.note_top_logprobs(logits, sampled, selected)
        self.batch.append_on_device(selected, sampled.tokens)
        return sampled

    def _record(self, selected: SelectedRows, sampled: SampledRows, ended: list[int], stopped: StopCheck) -> None:
        """Records the drawn tokens of the selected rows, which are on the CPU. Adds rows that end to ``ended``."""
        ended += self.batch.record(selected, sampled)
        ended += stopped(selected.rows, sampled.tokens)

    def _verify_drafts(
        self, logits: Tensor, selected: SelectedRows, drafts: list[list[int]], ended: list[int], stopped: StopCheck
    ) -> list[DraftOutput]:
        """Verifies draft tokens: draws a token at every position at once, and keeps those of each row up to the first that its draft did not have.

        Row r's ``len(drafts[r]) + 1`` positions are contiguous in ``logits``. A position's number and settings do not depend on the other positions, so
        the tokens are those of separate steps. ``stopped`` is told of one token of a row at a time.
        """
        counts = [len(draft) + 1 for draft in drafts]
        first = list(itertools.accumulate(counts[:-1], initial=0))
        rows = torch.tensor([row for row, count in zip(selected.rows, counts, strict=True) for _ in range(count)])
        offsets = torch.tensor([offset for count in counts for offset in range(count)])
        metadata = self.batch.on_device.sampling_metadata(to_device(rows, self.device), to_device(offsets, self.device))
        sampled = self.sampler(logits, metadata)
        # Rows advance by several positions, so the numbers that were computed ahead are no longer theirs.
        self._uniforms = (None, [])
        sampled = SampledRows(*(values.to("cpu") for values in sampled))
        check_finite(sampled)
        tokens = sampled.tokens.tolist()
        limits = (selected.limit - self.batch.host.length.index_select(0, selected.index)).tolist()
        stops, spans, at_end = selected.stop_tokens.tolist(), list[list[int]](), list[int]()
        for row, at, draft, limit, stop in zip(selected.rows, first, drafts, limits, stops, strict=True):
            drawn = tokens[at : at + len(draft) + 1]
            kept = next((i for i, token in enumerate(draft) if token != drawn[i]), len(draft)) + 1
            end = next((i + 1 for i, token in enumerate(drawn[:kept]) if token in stop or i + 1 == limit), 0)
            spans.append(drawn[: end or kept])
            at_end += [row] if end else []
        self.batch.record_spans(selected, spans, first, sampled)
        ended += at_end
        watched = self.batch.with_stop_checker.keys() | self.batch.with_repetition.keys()
        for place, row in enumerate(selected.rows):
            if row in watched:
                end = next((i + 1 for i in range(len(spans[place])) if stopped((row,), sampled.tokens[first[place] + i : first[place] + i + 1])), 0)
                if end:
                    self.batch.shorten(row, len(spans[place]) - end)
                    spans[place] = spans[place][:end]
                    ended.append(row)
        return [DraftOutput(row, len(draft), len(span) - 1) for row, draft, span in zip(selected.rows, drafts, spans, strict=True) if draft]

    def _verify_stepwise(
        self, logits: Tensor, selected: SelectedRows, drafts: list[list[int]], ended: list[int], stopped: StopCheck
    ) -> list[DraftOutput]:
        """As ``_verify_drafts``, where a position's logits or output depend on the token before: draws a token for every selected row, then again for the
        rows whose draft token equals the drawn one, until there are none."""
        starts, at = [], 0
        for draft in drafts:
            starts.append(at)
            at += len(draft) + 1
        accepted = [0] * len(drafts)
        places = list(range(len(drafts)))
        current = selected
        while places:
            own = torch.tensor([starts[place] + accepted[place] for place in places], device=self.device)
            sampled = SampledRows(*(values.to("cpu") for values in self._sample(logits.index_select(0, own), current)))
            self._record(current, sampled, ended, stopped)
            ended_rows = set(ended)
            matching = []
            for place, token in zip(places, sampled.tokens.tolist(), strict=True):
                draft, count = drafts[place], accepted[place]
                if count < len(draft) and draft[count] == token:
                    accepted[place] += 1
                    if selected.rows[place] not in ended_rows:
                        matching.append(place)
            places = matching
            if matching:
                current = self.batch.narrow(selected, matching)
        return [
            DraftOutput(row, len(draft), count) for row, draft, count in zip(selected.rows, drafts, accepted, strict=True) if draft
        ]

    def _next_uniforms(self, selected: SelectedRows) -> Tensor:
        """Returns the random number of each row at its position. For a selection that is kept, computes those of one block of positions at a time."""
        if selected.is_greedy:
            return torch.zeros(len(selected.rows), dtype=torch.float64, device=self.device)
        kept, ahead = self._uniforms
        if kept is not selected or not ahead:
            lengths = self.batch.on_device.length.index_select(0, selected.device_index)
            # While rows join or leave in every step, only the first of a block would be used.
            count = BLOCK_TOKENS if kept is selected else 1
            ahead = list(uniforms(selected.random_key, lengths + torch.arange(count, device=self.device).unsqueeze(1)))
            self._uniforms = (selected, ahead)
        return ahead.pop(0)

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _logits(self, hidden: Tensor, first: int, last: int) -> Tensor:
        """Returns the logits of rows ``first`` to ``last - 1`` of the step's hidden states."""
        own = partial(self.decoder.logits, hidden[first:last])
        return own() if self.ranks is None else self.ranks.run("logits", {"first": first, "last": last}, own)

    def pool(self, request: Request) -> PooledStates:
        """Returns what collects the hidden states of a pooling request from now on."""
        assert self.pooler is not None and request.pooling is not None
        self.pooled[request.id] = PooledStates(self.pooler, request.pooling, len(request.prompt_token_ids))
        return self.pooled[request.id]

    def _score_prompts(self, output: SchedulerOutput, hidden: Tensor, start: int) -> None:
        """Collects prompt log-probabilities, and what is pooled. ``start``: the row of ``hidden`` at which the first chunk begins."""
        for chunk in output.prefills:
            pooled = self.pooled.get(chunk.request_id)
            if pooled is not None:
                pooled.note(hidden, start, len(chunk.tokens), chunk.start, partial(self._logits, hidden))
            scores = self.prompt_logprobs.get(chunk.request_id)
            if scores is not None:
                scores.note(partial(self._logits, hidden), self.decoder, start, len(chunk.tokens), chunk.start)
                if scores.is_complete:
                    del self.prompt_logprobs[chunk.request_id]
            start += len(chunk.tokens)

    # -- the swap space ------------------------------------------------------------------------------------------------

    @property
    def _all_caches(self) -> list[CacheLayer]:
        return self.caches + self.proposer.caches if self.proposer is not None else self.caches

    @torch.inference_mode()
    def measure_swap(self, num_blocks: int) -> float:
        """Returns the seconds to copy ``num_blocks`` blocks, and the states of a sequence, to host memory. The cache is only read."""
        host = host_pool(self._all_caches, num_blocks, 1)
        moves = Moves(swap_outs=[BlockCopy(block, block) for block in range(num_blocks)], state_swap_outs=[BlockCopy(0, 0)])
        seconds = math.inf
        # The first copy also pays for page faults in the new memory, so the fastest counts.
        for _ in range(3):
            self._wait_for_device()
            began = time.perf_counter()
            apply_moves(self._all_caches, host, moves)
            self._wait_for_device()
            seconds = min(seconds, time.perf_counter() - began)
        return seconds

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
