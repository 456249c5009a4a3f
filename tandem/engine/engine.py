"""The inference engine: requests in, answers out, one step at a time."""

import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Series

import torch
from torch import Tensor

from tandem.engine import batches, decode, draft_plan, preemption, prefill
from tandem.engine.adapters import Adapters
from tandem.engine.answers import Answer, completion_of, finish_of, is_hidden_stop, output_of
from tandem.engine.block_allocator import BlockAllocator
from tandem.engine.block_copies import host_pool
from tandem.engine.costs import preemption_costs
from tandem.engine.draft_length import DraftLength
from tandem.engine.draft_model import DraftModel
from tandem.engine.figures import EngineFigures, Meter
from tandem.engine.grammars import Grammars
from tandem.engine.integrity import check_state, sequences_of
from tandem.engine.lifecycle import State, Transition, move
from tandem.engine.logit_rules import LogitRules, rules_of
from tandem.engine.lora_request import LoRARequest
from tandem.engine.outputs import RequestOutput, RequestTimes
from tandem.engine.overlap import Flight, make_overlap, overlaps_steps
from tandem.engine.prefix_cache import PrefixCache
from tandem.engine.prompt_scores import PromptScores
from tandem.engine.proposers import draft_cache, make_proposer, new_draft
from tandem.engine.ranks import Ranks
from tandem.engine.request import Prefill, Request, Sequence, random_key
from tandem.engine.row_table import RowTable
from tandem.engine.runner import Guessed, Runner
from tandem.engine.sampling_params import SamplingParams
from tandem.engine.scheduler import Decision, schedule
from tandem.engine.settings import EngineSettings
from tandem.engine.speculative import SpeculativeSettings
from tandem.engine.state import PauseMode, SchedulerState, limits_of
from tandem.engine.stats import EngineStats
from tandem.engine.streaming import Streams
from tandem.engine.text_watch import TextWatch
from tandem.engine.updates import keep
from tandem.kernels import empty_cache, stored_dtype
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface import load_tensors
from tandem.model.weight_digests import weight_digests
from tandem.text.tokenizer import Tokenizer
from tandem.types import FinishReason, RunError, UserError, WeightVersion

FIRST_VERSION = WeightVersion(0, 0)
_ENDS = {
    FinishReason.STOP: Transition.STOP, FinishReason.LENGTH: Transition.BUDGET_STOP, FinishReason.ABORT: Transition.ABORT,
}


class Engine:
    """Continuous batching over one decoder. Not thread-safe: one owner adds, steps, aborts and updates.

    ``decoder`` is packed here where it is not, and belongs to the engine from now on. Without a ``tokenizer`` answers
    have no text, and nothing but lengths and ``stop_token_ids`` ends a completion. ``ranks``: the others of a tensor-parallel engine, whose
    first part ``decoder`` is. With ``digest_weights`` each set of weights is digested before it is packed (not with ranks).
    ``speculative``: how tokens are guessed, by ``draft`` where its method is ``draft``.
    """

    def __init__(
        self, decoder: Decoder, settings: EngineSettings, tokenizer: Tokenizer | None = None,
        version: WeightVersion = FIRST_VERSION, ranks: Ranks | None = None, digest_weights: bool = False,
        speculative: SpeculativeSettings | None = None, draft: Decoder | None = None,
    ) -> None:
        shapes = decoder.shapes
        settings.check(shapes.max_positions)
        self.settings = settings
        self.tokenizer = tokenizer
        self._decoder = decoder
        self._digest_weights = digest_weights and ranks is None
        self.weight_digests = weight_digests(decoder) if self._digest_weights else {}
        if not decoder.is_packed:
            decoder.pack()
        allocator = BlockAllocator(settings.num_blocks)
        self._adapters = Adapters(decoder, settings.max_loras, settings.max_lora_rank, ranks)
        embedding = decoder.embed_tokens
        self._state = SchedulerState(
            limits_of(settings, shapes, 0 if speculative is None else speculative.guessing_seqs(embedding.device.type)), allocator,
            PrefixCache(allocator, settings.finds_prefixes), version, self._read_back,
            adapter_key=self._adapters.key, host=BlockAllocator(settings.swap_blocks),
            costs=preemption_costs(
                shapes, str(embedding.dtype).removeprefix("torch."), embedding.device.type, settings.kv_cache_dtype
            ),
        )
        logprob_dtype = torch.promote_types(embedding.dtype, torch.float32)
        self._table = RowTable(settings.max_num_seqs, settings.max_model_len, logprob_dtype)
        proposer = make_proposer(speculative, draft, shapes, settings, self._table)
        self._ranks = ranks
        if ranks is not None:
            sizes_of_pools = {"num_blocks": settings.num_blocks, "swap_blocks": settings.swap_blocks, "kv_cache_dtype": settings.kv_cache_dtype}
            ranks.run("allocate", sizes_of_pools, lambda: None)
        overlaps = overlaps_steps(settings, embedding.device, ranks is not None, speculative is not None)
        # One block more than is handed out, for rows that only fill up a batch.
        sizes = (settings.num_blocks + overlaps, decoder.local.num_kv_heads, shapes.head_dim)
        kv_dtype = stored_dtype(settings.kv_cache_dtype, embedding.dtype)
        self._empty_cache = lambda: empty_cache(sizes, shapes.num_layers, kv_dtype, embedding.device)
        caches = self._empty_cache()
        self._speculative = speculative
        host = host_pool(caches + (proposer.caches if proposer is not None else []), settings.swap_blocks)
        self._runner = Runner(decoder, caches, self._table, self._adapters, ranks, host, proposer)
        self._overlap = make_overlap(self._runner, settings) if overlaps else None
        self._flight: Flight | None = None
        self._attended: set[str] = set()
        self._meter = Meter()
        self._grammars = Grammars(tokenizer, shapes.vocab_size)
        self._answers: dict[str, Answer] = {}
        self._ready: list[RequestOutput] = []
        self._streams = Streams(tokenizer)
        self._arrivals = 0
        self._preemptions = 0
        self._step_tokens = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt_token_ids: Series[int], params: SamplingParams, *, prompt: str | None = None,
        key: int | None = None, first_index: int = 0, priority: int = 0, cache_salt: str = "",
        lora_request: LoRARequest | None = None, num_draft_tokens: int | None = None,
    ) -> None:
        """Queue a request. ``key`` names its random numbers (``None``: the number of requests added before it).
        ``lora_request``: its adapter, loaded here where it is not, or where its folder has changed. ``num_draft_tokens``:
        guesses in one step at most (0: none; ``None``: what the engine was told).

        Raises ``UserError``, and queues nothing, where the request cannot be served.
        """
        prompt_token_ids = self._truncated(prompt_token_ids, params)
        rules = self._check(prompt_token_ids, params)
        if request_id in self._answers:
            raise UserError(f"request id {request_id!r} is in use; give every request an id of its own")
        draft_tokens = self._draft_tokens(num_draft_tokens)
        if lora_request is not None and not self._adapters.is_current(lora_request):
            self.add_lora(lora_request)
        length = len(prompt_token_ids)
        own_end = self._end_tokens()
        stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else own_end)
        end = self.settings.max_model_len if params.max_tokens is None else length + params.max_tokens
        request = Request(
            id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            seed=self.settings.seed if params.seed is None else params.seed,
            key=self._arrivals if key is None else key,
            arrival=self._arrivals,
            stop_token_ids=tuple(sorted(stops)),
            end_token_ids=own_end,
            priority=priority,
            first_index=first_index,
            cache_salt=cache_salt,
            adapter=lora_request.lora_name if lora_request is not None else "",
            max_length=min(end, self.settings.max_model_len),
            rules=rules,
            draft_tokens=draft_tokens,
        )
        self._arrivals += 1
        keys = [random_key(request.seed, request.key, first_index + i) for i in range(params.n)]
        sequences = [
            Sequence(request, i, key, text_watch=self._text_watch(params), cursor=rules.cursor() if rules is not None else None)
            for i, key in enumerate(keys)
        ]
        if draft_tokens and self._speculative is not None:
            for sequence in sequences:
                sequence.draft = DraftLength(draft_tokens, self._speculative.worth, self._speculative.adaptive)
        if rules is not None or lora_request is not None or params.logprobs is not None or params.prompt_logprobs is not None:
            self._attended.add(request_id)
        self._meter.arrived(request_id)
        self._answers[request_id] = answer = Answer(request, [None] * params.n, set(sequences), RequestTimes(time.monotonic()))
        if params.prompt_logprobs is not None:
            answer.prompt_scores = PromptScores(request.prompt_token_ids, params.prompt_logprobs)
            self._runner.prompt_scores[request_id] = answer.prompt_scores
        # A group takes its rows at once; what no step could hold goes in parts, each of which shares the prompt. Static
        # reservations share nothing.
        size = 1 if self._state.limits.reservation else self.settings.max_num_seqs
        for first in range(0, params.n, size):
            part = sequences[first : first + size]
            is_scored = answer.prompt_scores is not None and first == 0
            prefill.queue(self._state, Prefill(part, request.prompt_token_ids, is_scored=is_scored))

    def check_request(self, prompt_token_ids: Series[int], params: SamplingParams) -> None:
        """Raise ``UserError`` for a request that this engine cannot serve."""
        self._check(self._truncated(prompt_token_ids, params), params)

    def _check(self, prompt_token_ids: Series[int], params: SamplingParams) -> LogitRules | None:
        """As ``check_request`` for a prompt that is truncated already; returns its rules."""
        length, vocab = len(prompt_token_ids), self._decoder.shapes.vocab_size
        if not length:
            raise UserError("the prompt is empty; give it at least one token")
        if length + (params.max_tokens != 0) > self.settings.max_model_len:
            raise UserError(
                f"the prompt has {length} tokens, which leaves no room for a completion in max_model_len "
                f"({self.settings.max_model_len}); shorten the prompt or raise max_model_len"
            )
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab:
            wrong = next(token for token in prompt_token_ids if not 0 <= token < vocab)
            raise UserError(f"the prompt holds token id {wrong}; the model's vocabulary has the ids 0 to {vocab - 1}")
        params.check_vocabulary(vocab)
        if params.stop_texts and self.tokenizer is None:
            raise UserError("sampling stop needs a tokenizer and this engine has none; use stop_token_ids")
        end_tokens = self._end_tokens().union(params.stop_token_ids or ())
        return rules_of(params, prompt_token_ids, end_tokens, vocab, self.tokenizer, self._grammars)

    def _truncated(self, prompt_token_ids: Series[int], params: SamplingParams) -> Series[int]:
        """The end of the prompt that ``truncate_prompt_tokens`` asks for."""
        limit = params.truncate_prompt_tokens
        if limit is not None and limit < 0:
            room = 1 if params.max_tokens is None else params.max_tokens
            limit = max(1, self.settings.max_model_len - room)
        return prompt_token_ids if limit is None else prompt_token_ids[-limit:]

    def _draft_tokens(self, asked: int | None) -> int:
        """Guesses in one step for a request that asks for ``asked`` of them."""
        most = 0 if self._speculative is None else self._speculative.num_speculative_tokens
        if asked is not None and not 0 <= asked <= most:
            raise UserError(
                f"num_draft_tokens is {asked}; this engine proposes at most {most} tokens a step, give 0 to {most}"
                + ("" if most else ", or start it with speculative settings")
            )
        return most if asked is None else asked

    def _end_tokens(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_token_ids if self.tokenizer is not None else ())

    def abort(self, request_id: str) -> bool:
        """End a request now; its answer, with what was drawn so far, comes with the next step. False where no such
        request is under way."""
        self._land()
        answer = self._answers.get(request_id)
        if answer is None:
            return False
        state = self._state
        running = [sequence for sequence in answer.open if sequence.row >= 0]
        self._read_back(running)
        decode.leave(state, running, has_ended=True)
        preemption.drop_swapped(state, lambda waiting: waiting.sequences[0] in answer.open)
        if state.prefilling is not None and state.prefilling.sequences[0] in answer.open:
            prefill.give_up(state, state.prefilling)
        for sequence in list(answer.open):
            self._answer(sequence, FinishReason.ABORT, None)
        self._settle()
        return True

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` still has something to do or to hand out."""
        return bool(self._answers) or self.has_outputs

    @property
    def request_ids(self) -> list[str]:
        """The requests that are not answered yet."""
        return list(self._answers)

    @property
    def has_outputs(self) -> bool:
        """Whether ``take_outputs`` has something to hand out."""
        return bool(self._ready or self._streams.has_news)

    @property
    def shapes(self) -> ModelShapes:
        return self._decoder.shapes

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.embed_tokens.dtype

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the requests that are answered, and what is new of those that are streamed."""
        if not self._decoder.is_packed:
            raise RunError("the engine has no whole set of weights since an update failed; update the weights again")
        if self.is_sleeping:
            raise RunError("the engine is asleep; wake it up before its next step")
        if self._state.pause not in (None, PauseMode.WAIT):
            return self.take_outputs()
        began = time.perf_counter()
        is_ahead = self._overlap is not None and not self._attended
        if not is_ahead or preemption.may_preempt(self._state):
            self._land()
        decision = schedule(self._state)
        self._note_scheduled(decision)
        self._step_tokens = len(decision.decode) + sum(len(chunk.tokens) for chunk in decision.prefill)
        if is_ahead:
            self._launch(decision, began)
        elif decision.has_work:
            self._compute(decision, began)
        return self.take_outputs()

    def _compute(self, decision: Decision, began: float) -> None:
        """One step from its plan to its tokens."""
        if self._overlap is not None:
            self._overlap.forget()
        ended: list[int] = []
        try:
            self._fill_rows(decision)
            guessed = self._runner.run(decision, ended, self._stopped_by_text)
        except BaseException:
            self._fail(ended)
            raise
        for row, proposed, accepted in guessed:
            draft_plan.advance(self._state, row, proposed, accepted)
            self._step_tokens += proposed
        self._finish(decision, guessed, ended, began)

    def _launch(self, decision: Decision, began: float) -> None:
        """Start one step, and only then look at the one before."""
        assert self._overlap is not None
        launched: Flight | None = None
        if decision.has_work:
            try:
                self._fill_rows(decision)
                launched = self._overlap.launch(decision, self._state.decoding)
            except BaseException:
                self._fail([])
                raise
        before, self._flight = self._flight, launched
        if before is not None:
            self._collect(before, began)
        if not self._answers:
            self._land()

    def _land(self) -> None:
        """Wait for the step that was launched last: nothing is under way on the device afterwards."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._collect(flight, time.perf_counter())

    def _collect(self, flight: Flight, began: float) -> None:
        assert self._overlap is not None
        ended: list[int] = []
        try:
            self._overlap.collect(flight, ended, self._stopped_by_text)
        except BaseException:
            self._fail(ended)
            raise
        self._finish(flight.decision, [], ended, began)

    def _finish(self, decision: Decision, guessed: list[Guessed], ended: list[int], began: float) -> None:
        self._meter.stepped(self._state, decision, guessed, time.perf_counter() - began)
        self._note_first_tokens(decision)
        self._end(ended)
        self._streams.running(self._answers, self._table, self._state.version)

    def _fail(self, ended: list[int]) -> None:
        """After a step that raised: what it ended has ended, and the rest is computed again."""
        self._flight = None
        if self._overlap is not None:
            self._overlap.forget()
        self._end(ended)
        self._forget_cache()

    def take_outputs(self) -> list[RequestOutput]:
        """What the next ``step`` would hand out without computing anything: the answers of aborted requests."""
        ready, self._ready = self._ready, []
        return ready + self._streams.take()

    def _note_scheduled(self, decision: Decision) -> None:
        self._preemptions += len(decision.preempted)
        now = time.monotonic() if decision.prefill else 0.0
        for chunk in decision.prefill:
            times = self._answers[chunk.request_id].times
            times.scheduled_s = times.scheduled_s or now

    def _note_first_tokens(self, decision: Decision) -> None:
        now = time.monotonic() if decision.prefill else 0.0
        for chunk in decision.prefill:
            times = self._answers[chunk.request_id].times
            if chunk.rows:
                times.first_token_s = times.first_token_s or now

    def _fill_rows(self, decision: Decision) -> None:
        """Fill the table's rows for sequences whose last chunk stands in this step or that are swapped in."""
        joined = [row for chunk in decision.prefill for row in chunk.rows]
        joined += decision.resumed
        if joined:
            sequences = [self._state.decoding[row] for row in joined]
            self._table.join(sequences, [len(sequence.known_tokens) for sequence in sequences])

    def _stopped_by_text(self, rows: Series[int]) -> list[int]:
        """Those of ``rows``, each of which has just drawn a token, whose stop text is complete with it."""
        drew = set(rows) if self._table.with_text_watch else set()
        watched = [(row, sequence) for row, sequence in self._table.with_text_watch.items() if row in drew]
        if not watched:
            return []
        tokens = self._table.last_token[[row for row, _ in watched]].tolist()
        return [
            row
            for (row, sequence), token in zip(watched, tokens, strict=True)
            if not is_hidden_stop(sequence.request, token) and sequence.text_watch.push(token)
        ]

    def _end(self, rows: list[int]) -> None:
        if not rows:
            return
        ended = [self._state.decoding[row] for row in dict.fromkeys(rows)]
        self._read_back(ended)
        decode.leave(self._state, ended, has_ended=True)
        for sequence in ended:
            if sequence.request.params.max_tokens == 0:
                sequence.forget_drawn()
            self._answer(sequence, *finish_of(sequence))
        self._settle()

    def _settle(self) -> None:
        """Where the last sequence of a static batch has ended, take back what the batch holds."""
        if self._state.ended and not (self._state.decoding or self._state.prefilling):
            batches.free_ended(self._state)

    def _answer(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Note one completion; with its last one the request is answered."""
        move(sequence, _ENDS[reason], self._state.counts)
        answer = self._answers[sequence.request.id]
        completion = completion_of(sequence, reason, stop_reason, self.tokenizer)
        answer.completions[sequence.index] = completion
        answer.open.remove(sequence)
        answer.cached_tokens = max(answer.cached_tokens, sequence.cached)
        is_streamed = sequence.request.params.is_streamed
        if is_streamed:
            self._streams.ended(answer, completion, sequence)
        if not answer.open:
            del self._answers[sequence.request.id]
            self._attended.discard(sequence.request.id)
            self._meter.left(sequence.request.id)
            self._runner.prompt_scores.pop(sequence.request.id, None)
            if not is_streamed:
                self._ready.append(output_of(answer, self.tokenizer))

    def _text_watch(self, params: SamplingParams) -> TextWatch | None:
        watched = (params.stop_texts or params.is_streamed) and params.max_tokens != 0 and params.detokenize
        return TextWatch(self.tokenizer, params) if watched and self.tokenizer is not None else None

    def _read_back(self, sequences: list[Sequence]) -> None:
        self._table.read_back(sequences, self._state.version)

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> WeightVersion:
        return self._state.version

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]], version: WeightVersion,
        draft_tensors: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        """Take a whole set of weights, by Hugging Face names, between two steps; with ``draft_tensors`` the draft model's too, both or
        neither.

        Requests under way keep their tokens; their keys and values are computed again under the new weights, except while the
        engine is paused with ``keep``. Where a set does not fit its model ``UserError`` is raised and the old weights stay.
        """
        self._land()
        draft = None if draft_tensors is None else new_draft(self._runner.proposer, draft_tensors)
        kept = list(self._state.decoding.values()) if self._state.pause is PauseMode.KEEP else []
        if self._state.pause is PauseMode.KEEP:
            self._read_back(kept)
        else:
            preemption.preempt_all(self._state, Transition.UPDATE)
        try:
            if self._ranks is not None:
                self._ranks.update_weights(tensors)
            else:
                # Digests are those of plain weights, all of which must be there then.
                load_tensors(self._decoder, tensors, pack=not self._digest_weights)
                if self._digest_weights:
                    self.weight_digests = weight_digests(self._decoder)
                    self._decoder.pack()
            self._state.version = WeightVersion(*version)
            if draft is not None and isinstance(self._runner.proposer, DraftModel):
                self._runner.proposer.decoder = draft
        finally:
            if self._state.pause is PauseMode.KEEP:
                keep(self._state, self._table, kept)
            if self._overlap is not None:
                self._overlap.forget()
        # Keys of the old version cannot match any more. Their blocks are used first: their memory is warm.
        self._state.allocator.forget_all()

    def close(self) -> None:
        """End the other ranks of a tensor-parallel engine. It computes nothing any more then."""
        if self._ranks is not None:
            self._ranks.close()

    # -- adapters ------------------------------------------------------------------------------------------------------

    def add_lora(self, request: LoRARequest) -> str:
        """Read an adapter from its folder, between two steps; returns the digest of its content.

        It takes the place of the one with its name. Requests under way with that one keep their tokens and go on with
        the new one; their keys and values are computed again. Raises ``UserError`` where the adapter cannot be used or
        has no place, and changes nothing then.
        """
        self._land()
        adapter = self._adapters.read(request)
        in_use = self._adapters_in_use()
        if request.lora_name in in_use:
            preemption.preempt_all(self._state, Transition.UPDATE)
        self._adapters.put(request, adapter, in_use)
        return adapter.digest

    def remove_lora(self, name: str) -> None:
        """Forget the adapter ``name``. Raises ``UserError`` where it is not loaded or a request under way has it."""
        self._land()
        if name in self._adapters_in_use():
            raise UserError(f"adapter '{name}' is used by requests under way; abort them or wait for their answers")
        self._adapters.remove(name)

    def list_loras(self) -> dict[str, str]:
        """The digest of each loaded adapter's content by its name."""
        return self._adapters.digests()

    def _adapters_in_use(self) -> set[str]:
        return {answer.request.adapter for answer in self._answers.values()} - {""}

    def _forget_cache(self) -> None:
        """After a step that failed: what it wrote of keys and values is unknown, so all of it is computed again."""
        preemption.preempt_all(self._state, Transition.FAIL)
        self._state.allocator.forget_all()

    # -- pauses --------------------------------------------------------------------------------------------------------

    def pause(self, mode: str = "recompute") -> None:
        """Stop, as ``PauseMode`` has it; steps hand out answers all the same, and requests that are added wait. Raises ``UserError``
        for an unknown mode, and for ``keep`` in a deterministic engine."""
        if mode not in list(PauseMode):
            raise UserError(f"pause mode is {mode!r}; it must be one of {', '.join(PauseMode)}")
        if mode == PauseMode.KEEP and self.settings.deterministic:
            raise UserError(
                "pause mode is 'keep', after which one sequence's keys and values are of two weight versions; use 'recompute', or start "
                "the engine with deterministic=False"
            )
        self._land()
        self._state.pause = PauseMode(mode)
        if mode == PauseMode.ABORT:
            for request_id in list(self._answers):
                self.abort(request_id)

    def resume(self) -> None:
        """Go on after a pause."""
        self._state.pause = None

    @property
    def is_paused(self) -> bool:
        return self._state.pause is not None

    @property
    def is_drained(self) -> bool:
        """Whether nothing has begun that is not answered: when a pause with ``wait`` is complete."""
        counts = self.counts()
        return not (counts[State.PREFILLING] or counts[State.DECODING] or counts[State.PREEMPTED])

    # -- the cache -----------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget what cached blocks hold. Requests under way keep theirs."""
        self._state.allocator.forget_all()

    def sleep(self) -> None:
        """Give the memory of the KV cache back. Requests under way wait, and are computed again after ``wake_up``. Raises
        ``UserError`` for an engine with ranks."""
        if self._ranks is not None:
            raise UserError("a tensor-parallel engine cannot sleep; stop it, or use one rank")
        self._land()
        preemption.preempt_all(self._state, Transition.UPDATE)
        self._state.allocator.forget_all()
        self._runner.caches = []
        if self._overlap is not None and self._overlap.graphs is not None:
            self._overlap.graphs.forget()
        if isinstance(self._runner.proposer, DraftModel):
            self._runner.proposer.caches = []

    def wake_up(self) -> None:
        if self.is_sleeping:
            self._runner.caches = self._empty_cache()
            if isinstance(self._runner.proposer, DraftModel):
                self._runner.proposer.caches = draft_cache(self._runner.proposer.decoder, self.settings.num_blocks)

    @property
    def is_sleeping(self) -> bool:
        return not self._runner.caches

    # -- what it does --------------------------------------------------------------------------------------------------

    def counts(self) -> dict[State, int]:
        """How many sequences are in each state; all that were ever ``completed`` count."""
        found = Counter(sequence.state for answer in self._answers.values() for sequence in answer.open)
        found[State.COMPLETED] = sum(self._state.counts[transition] for transition in _ENDS.values())
        return {state: found[state] for state in State}

    def transitions(self) -> dict[Transition, int]:
        """How often each transition was made."""
        return {transition: self._state.counts[transition] for transition in Transition}

    def figures(self) -> EngineFigures:
        """What was computed so far, and how well the cache was used."""
        return self._meter.figures()

    def stats(self) -> EngineStats:
        state = self._state
        prefilling = len(state.prefilling.sequences) if state.prefilling is not None else 0
        running = len(state.decoding) + prefilling
        guesses = self._meter.speculation
        return EngineStats(
            num_requests_running=running,
            num_requests_waiting=sum(len(answer.open) for answer in self._answers.values()) - running,
            kv_cache_usage=1 - state.allocator.free_count / state.allocator.count,
            num_preemptions=self._preemptions,
            step_tokens=self._step_tokens,
            num_requests=len(self._answers),
            num_swaps=state.counts[Transition.SWAP_OUT],
            num_drafts=guesses.proposals,
            num_draft_tokens=guesses.proposed,
            num_accepted_tokens=guesses.accepted,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless blocks, rows, tables, swap space and states agree. Idle, all blocks are free or cached."""
        self._land()
        check_state(self._state)
        open_sequences = {sequence for answer in self._answers.values() for sequence in answer.open}
        found = sequences_of(self._state)
        assert len(found) == len(set(found)) and set(found) == open_sequences, "a sequence is nowhere, or in two places"
