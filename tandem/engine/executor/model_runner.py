"""From a scheduler output through the model to one token for every row that draws."""

import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tandem.engine.core.scheduler_output import SchedulerOutput
from tandem.engine.executor.cuda_graphs import Bucket, DecodeGraphs, Replay
from tandem.engine.executor.forward import Computed, forward
from tandem.engine.executor.in_flight_step import DraftOutput, InFlightStep, to_host
from tandem.engine.executor.input_batch import InputBatch, SelectedRows
from tandem.engine.executor.model_input import ModelInput, add_prefills, advance, decode_input, empty_input, span_input
from tandem.engine.executor.ranks import Ranks
from tandem.engine.executor.step_message import encode_step
from tandem.engine.kv_cache.block_pool import BlockCopy
from tandem.engine.kv_cache.cache_tensors import Moves, apply_moves, host_pool
from tandem.engine.lora.adapters import Adapters
from tandem.engine.sample.logprobs import PromptLogprobs
from tandem.engine.sample.random_numbers import uniforms
from tandem.engine.sample.sampler import Sampler, SamplingMetadata
from tandem.engine.spec_decode.speculative import Proposer
from tandem.kernels.api import BLOCK_TOKENS, KVLayer, SampledRows
from tandem.model.decoder import Decoder
from tandem.model.lora import LoraBatch
from tandem.types import RunError

StopCheck = Callable[[tuple[int, ...]], list[int]]
"""Asked of rows that have just drawn a token which of them end for a reason that is neither length nor a stop token."""


class ModelRunner:
    """Executes scheduler outputs on ``decoder`` over ``caches``.

    ``execute_model`` launches a step and ``synchronize`` waits for it and records its tokens. A step may be launched before the one before is
    synchronized: its tokens never leave the device in between. A row that turns out to have ended is then computed once more, in the block that it
    holds until then, and the result is dropped; steps run in the order in which they were launched, so the next owner of that block writes after
    it.

    While no sequence joins, leaves or enters another block, the input of the last step is kept and moved on by one token. ``host``: the swap
    space, a layer for each of ``caches`` and of the proposer's. ``graphs``: replays steps in which every row only decodes.
    """

    def __init__(
        self, decoder: Decoder, caches: list[KVLayer], batch: InputBatch, adapters: Adapters, ranks: Ranks | None = None,
        host: list[KVLayer] | None = None, proposer: Proposer | None = None,
    ) -> None:
        self.decoder = decoder
        self.adapters = adapters
        self.ranks = ranks
        self.caches = caches
        self.batch = batch
        self.host = host or []
        self.proposer = proposer
        self.sampler = Sampler(decoder.kernels)
        self.device = decoder.embed_tokens.device
        self.graphs: DecodeGraphs | None = None
        self.prompt_logprobs: dict[str, PromptLogprobs] = {}
        """By request: where the log-probabilities of its prompt are collected, until they are complete."""
        self._selected: SelectedRows | None = None
        self._last: tuple[SelectedRows, ModelInput] | None = None
        self._uniforms: tuple[SelectedRows | None, list[Tensor]] = (None, [])

    # -- one step ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, output: SchedulerOutput) -> InFlightStep:
        """Launches one step. The rows that join with it are in the batch already."""
        moves = Moves(output.swap_outs, output.swap_ins, output.block_copies)
        apply_moves(self._all_caches, self.host, moves)
        self.batch.update(output.block_changes, output.joined_rows + output.resumed_rows)
        if not (output.decode_rows or output.prefills):
            if self.ranks is not None and any(moves):
                self._forward(moves, empty_input(self.device), draws=False, scores=False)
            return InFlightStep(output)
        drafts = self._propose_drafts(output)
        selected = self._select(output)
        if self.graphs is not None and not (output.prefills or drafts or self.batch.needs_host):
            self._last = None
            sampled = self.graphs.run(selected.device_index, self.batch.width(output.decode_rows))
            return InFlightStep(output, selected, *to_host(sampled))
        model_input = self._prepare_inputs(output, selected, drafts)
        scores = any(chunk.request_id in self.prompt_logprobs for chunk in output.prefills)
        hidden, logits = self._forward(moves, model_input, bool(selected.rows), scores)
        if scores:
            self._score_prompts(output, hidden, len(output.decode_rows) + sum(map(len, drafts)))
        if output.prefills and self.proposer is not None:
            self.proposer.read(output.prefills)
        if logits is None:
            return InFlightStep(output)
        if drafts:
            return InFlightStep(output, selected, logits=logits, drafts=drafts + [[]] * (len(selected.rows) - len(drafts)))
        return InFlightStep(output, selected, *to_host(self._sample(logits, selected)))

    @torch.inference_mode()
    def synchronize(self, step: InFlightStep, ended: list[int], stopped: StopCheck) -> list[DraftOutput]:
        """Waits for ``step`` and records what it drew; returns what became of its draft tokens.

        Rows that end are added to ``ended`` as they are found, also where the call fails later."""
        selected, sampled = step.selected, step.sampled
        if selected is None:
            return []
        if step.drafts is not None and step.logits is not None:
            return self._verify_drafts(step.logits, selected, step.drafts, ended, stopped)
        assert sampled is not None
        if step.done is not None:
            step.done.synchronize()
        held = [place for place, (row, sequence) in enumerate(zip(selected.rows, selected.sequences, strict=True)) if sequence.row == row]
        if len(held) < len(selected.rows):
            # Those that left have ended with the step before.
            if not held:
                return []
            selected = self.batch.narrow(selected, held)
            places = torch.tensor(held)
            sampled = SampledRows(*(values.index_select(0, places) for values in sampled))
        self._record(selected, sampled, ended, stopped)
        return []

    def decode(self, index: Tensor, width: int) -> SampledRows:
        """A step in which each of the rows ``index[R]`` feeds one token. Nothing waits for the device: this is what a graph holds."""
        rows = self.batch.on_device
        computed = forward(self.decoder, self.caches, decode_input(rows, index, width), draws=True, scores=False)
        assert computed.logits is not None
        sampled = self.sampler(computed.logits, rows.sampling_metadata(index))
        rows.append(index, sampled.tokens)
        return sampled

    def make_graphs(self, capture: Callable[[Replay], Replay] | None = None) -> DecodeGraphs:
        """Lets decoding steps be replayed from graphs, for a batch with a padding row. ``capture``: as ``DecodeGraphs`` has it."""
        rows = self.batch.on_device
        most = Bucket(rows.padding, rows.block_tables.shape[1])
        self.graphs = DecodeGraphs(self.decode, rows.padding, most, self.device, lambda: (*self.decoder.packed, self.caches), capture)
        return self.graphs

    # -- its input -----------------------------------------------------------------------------------------------------

    def _select(self, output: SchedulerOutput) -> SelectedRows:
        """The rows that draw: those that decode, and those that join with this step."""
        kept, joined = self._selected, output.joined_rows
        if kept is None or joined or kept.rows is not output.decode_rows:
            # The tuple of the next step is another object after a join, so a kept selection is never stale.
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
            fed, lengths = host.last_token[index].tolist(), host.length[index].tolist()
            spans = [[token, *draft] for token, draft in zip(fed, drafts, strict=True)]
            model_input = span_input(rows, index, spans, [length - 1 for length in lengths])
        else:
            model_input = decode_input(rows, selected.device_index[:count], self.batch.width(output.decode_rows))
        if output.prefills:
            model_input = add_prefills(model_input, output.prefills)
        if self.batch.with_adapter or any(chunk.adapter for chunk in output.prefills):
            model_input = model_input._replace(lora=self._lora(output, drafts))
        self._last = None if output.prefills or drafts else (selected, model_input)
        return model_input

    def _propose_drafts(self, output: SchedulerOutput) -> list[list[int]]:
        """The draft tokens that each decoding row feeds after its last token; empty where no row has any."""
        asked = [(i, row, count) for i, (row, count) in enumerate(zip(output.decode_rows, output.num_draft_tokens, strict=False)) if count]
        if self.proposer is None or not asked:
            return []
        proposed = self.proposer.propose([self.batch.speculating[row] for _, row, _ in asked], [count for _, _, count in asked])
        drafts: list[list[int]] = [[] for _ in output.decode_rows]
        for (i, _, _), tokens in zip(asked, proposed, strict=True):
            drafts[i] = tokens
        return drafts if any(drafts) else []

    def _lora(self, output: SchedulerOutput, drafts: list[list[int]]) -> LoraBatch | None:
        adapted, slot = self.batch.with_adapter, self.adapters.slot
        slots = []
        for i, row in enumerate(output.decode_rows):
            own = slot(adapted[row].request.adapter) if row in adapted else -1
            slots += [own] * (1 + (len(drafts[i]) if drafts else 0))
        for chunk in output.prefills:
            slots += [slot(chunk.adapter) if chunk.adapter else -1] * len(chunk.tokens)
        return self.adapters.batch(slots)

    def _forward(self, moves: Moves, model_input: ModelInput, draws: bool, scores: bool) -> Computed:
        """Computes ``model_input`` on every rank; the others make ``moves`` first, which are made here already."""
        own = partial(forward, self.decoder, self.caches, model_input, draws, scores)
        if self.ranks is None:
            return own()
        meta, blobs = encode_step(moves, model_input, draws, scores)
        return self.ranks.run("step", meta, own, blobs)

    # -- its tokens ----------------------------------------------------------------------------------------------------

    def _sample(self, logits: Tensor, selected: SelectedRows) -> SampledRows:
        """Draws a token for every selected row from ``logits[R, V]``; the next step feeds them."""
        positions = self.batch.positions_to_process(selected)
        metadata = SamplingMetadata(selected.temperature, selected.top_k, selected.top_p, selected.min_p, self._next_uniforms(selected))
        sampled = self.sampler(logits, metadata, positions)
        self.batch.note_top_logprobs(logits, sampled, selected)
        self.batch.append_on_device(selected, sampled.tokens)
        return sampled

    def _record(self, selected: SelectedRows, sampled: SampledRows, ended: list[int], stopped: StopCheck) -> None:
        """Records what every selected row has drawn, which is on the CPU; rows that end by it are added to ``ended``."""
        if not math.isfinite(float(sampled.raw.sum())):
            raise RunError("the model's logits are not finite numbers; check the weights that were loaded last")
        has_ended = self.batch.record(selected, *sampled)
        if has_ended.any():
            ended += selected.index[has_ended].tolist()
        ended += stopped(selected.rows)

    def _verify_drafts(
        self, logits: Tensor, selected: SelectedRows, drafts: list[list[int]], ended: list[int], stopped: StopCheck
    ) -> list[DraftOutput]:
        """Draws a token for every selected row, and again for the rows whose draft token was the token drawn, as long as there are any.

        Row r's ``len(drafts[r]) + 1`` positions follow one another in ``logits``. Each round draws what a step of its own would, so
        stop conditions, logits processors and streams see one token at a time."""
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
            over = set(ended)
            more = []
            for place, token in zip(places, sampled.tokens.tolist(), strict=True):
                draft, count = drafts[place], accepted[place]
                if count < len(draft) and draft[count] == token:
                    accepted[place] += 1
                    if selected.rows[place] not in over:
                        more.append(place)
            places = more
            if more:
                current = self.batch.narrow(selected, more)
        return [
            DraftOutput(row, len(draft), count) for row, draft, count in zip(selected.rows, drafts, accepted, strict=True) if draft
        ]

    def _next_uniforms(self, selected: SelectedRows) -> Tensor:
        """The random number of each row at its position. A kept selection computes those of a block of positions at a time."""
        if selected.is_greedy:
            return torch.zeros(len(selected.rows), dtype=torch.float64, device=self.device)
        kept, ahead = self._uniforms
        if kept is not selected or not ahead:
            lengths = self.batch.on_device.length.index_select(0, selected.device_index)
            ahead = list(uniforms(selected.random_key, lengths + torch.arange(BLOCK_TOKENS, device=self.device).unsqueeze(1)))
            self._uniforms = (selected, ahead)
        return ahead.pop(0)

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _logits(self, hidden: Tensor, first: int, last: int) -> Tensor:
        """Logits of rows ``first`` to ``last - 1`` of the step."""
        own = partial(self.decoder.logits, hidden[first:last])
        return own() if self.ranks is None else self.ranks.run("logits", {"first": first, "last": last}, own)

    def _score_prompts(self, output: SchedulerOutput, hidden: Tensor, start: int) -> None:
        """``start``: the first chunk's row of ``hidden``."""
        for chunk in output.prefills:
            scores = self.prompt_logprobs.get(chunk.request_id)
            if scores is not None:
                scores.note(partial(self._logits, hidden), self.decoder, start, len(chunk.tokens), chunk.start)
                if scores.is_complete:
                    del self.prompt_logprobs[chunk.request_id]
            start += len(chunk.tokens)

    # -- the swap space ------------------------------------------------------------------------------------------------

    @property
    def _all_caches(self) -> list[KVLayer]:
        return self.caches + self.proposer.caches if self.proposer is not None else self.caches

    @torch.inference_mode()
    def measure_swap(self, num_blocks: int) -> float:
        """Returns the seconds that copying ``num_blocks`` blocks to host memory takes; the cache is only read."""
        host = host_pool(self._all_caches, num_blocks)
        moves = Moves(swap_outs=[BlockCopy(block, block) for block in range(num_blocks)])
        seconds = math.inf
        # The first copies touch new memory.
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
