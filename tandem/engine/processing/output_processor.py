"""The output processor: tracks unfinished requests and builds their outputs."""

import time
from collections.abc import Callable
from dataclasses import replace

from tandem.engine.core.lifecycle import ENDS, move
from tandem.engine.core.request import Request, Sequence
from tandem.engine.core.scheduler import Scheduler
from tandem.engine.core.scheduler_output import ScheduledPrefill
from tandem.engine.executor.model_runner import ModelRunner
from tandem.engine.metrics.stats_logger import StatsLogger
from tandem.engine.processing.outputs import CompletionOutput, RequestOutput, RequestTimes
from tandem.engine.processing.request_state import RequestState, finish_reason_of, make_completion_output, make_request_output
from tandem.engine.processing.streaming import Streams
from tandem.engine.sample.logprobs import PromptLogprobs
from tandem.text.tokenizer import Tokenizer
from tandem.types import FinishReason


class OutputProcessor:
    """Collects completions until their request has finished. ``request_states``: the unfinished requests by id. ``synchronous``: the ids of
    those whose steps cannot be launched ahead. ``on_completion`` receives each completion that finishes, with its request's id, before the others of its
    request have."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, tokenizer: Tokenizer | None, logger: StatsLogger) -> None:
        self.request_states: dict[str, RequestState] = {}
        self.synchronous: set[str] = set()
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._logger = logger
        self._ready: list[RequestOutput] = []
        self.on_completion: Callable[[str, CompletionOutput], None] | None = None
        self._streams = Streams(tokenizer)

    def unfinished_sequences(self) -> list[Sequence]:
        """Returns the unfinished sequences of all requests."""
        return [sequence for state in self.request_states.values() for sequence in state.unfinished]

    def add_request(self, request: Request, sequences: list[Sequence]) -> None:
        """Adds a request that has arrived, with its ``sequences``."""
        params = request.params
        state = RequestState(request, [None] * params.n, set(sequences), RequestTimes(time.monotonic(), preemptions=request.preemptions))
        self.request_states[request.id] = state
        if request.is_synchronous:
            self.synchronous.add(request.id)
        if params.prompt_logprobs is not None:
            state.prompt_logprobs = PromptLogprobs(request.prompt_token_ids, params.prompt_logprobs)
            self._runner.prompt_logprobs[request.id] = state.prompt_logprobs
        if request.pooling is not None:
            state.pooled = self._runner.pool(request)

    def record_scheduled(self, chunks: tuple[ScheduledPrefill, ...]) -> None:
        """Records that a step with these ``chunks`` was scheduled."""
        now = time.monotonic() if chunks else 0.0
        for chunk in chunks:
            times = self.request_states[chunk.request_id].times
            times.scheduled_s = times.scheduled_s or now

    def record_first_tokens(self, chunks: tuple[ScheduledPrefill, ...]) -> None:
        """Records that a step has computed ``chunks``, from which requests may have drawn their first token, or have got what they pool."""
        now = time.monotonic() if chunks else 0.0
        for chunk in chunks:
            times = self.request_states[chunk.request_id].times
            if (chunk.rows or chunk.pooled_row >= 0) and not times.first_token_s:
                times.first_token_s = now
                self._logger.record_first_token(now - times.arrival_s)

    def collect_running(self) -> None:
        """Collects the new tokens of streamed requests after a step."""
        self._streams.add_running(self.request_states, self._runner.batch, self._scheduler.kv_cache.weight_version)

    def finish(self, sequence: Sequence) -> None:
        """Completes a sequence that has finished and left its row."""
        if sequence.request.params.max_tokens == 0:
            sequence.discard_output()
        self._complete(sequence, *finish_reason_of(sequence))

    def abort(self, sequence: Sequence) -> None:
        """Completes an aborted sequence, which holds neither row nor blocks, with its tokens so far."""
        self._complete(sequence, FinishReason.ABORT, None)

    def _complete(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Records one completion; the last one finishes the request."""
        move(sequence, ENDS[reason], self._scheduler.counts)
        request = sequence.request
        state = self.request_states[request.id]
        completion = make_completion_output(sequence, reason, stop_reason, self._tokenizer)
        state.completions[sequence.index] = completion
        state.unfinished.remove(sequence)
        if self.on_completion is not None:
            self.on_completion(request.id, completion)
        state.num_cached_tokens = max(state.num_cached_tokens, sequence.num_cached_tokens)
        is_streamed = request.params.is_streamed
        if is_streamed:
            self._streams.add_finished(state, completion, sequence)
        if not state.unfinished:
            del self.request_states[request.id]
            self.synchronous.discard(request.id)
            self._runner.prompt_logprobs.pop(request.id, None)
            self._runner.pooled.pop(request.id, None)
            if not is_streamed:
                output = make_request_output(state, self._tokenizer)
                if state.pooled is not None:
                    output = replace(output, pooled=state.pooled.data(self._scheduler.kv_cache.weight_version))
                self._ready.append(output)

    @property
    def has_outputs(self) -> bool:
        """Whether ``take_outputs`` has something to return."""
        return bool(self._ready or self._streams.has_outputs)

    def take_outputs(self) -> list[RequestOutput]:
        """Returns the outputs of requests that have finished, and the new part of those that are streamed, and forgets them."""
        ready, self._ready = self._ready, []
        return ready + self._streams.take_outputs()
