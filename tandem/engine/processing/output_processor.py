"""The output processor: tracks unfinished requests and builds their outputs."""

import time

from tandem.engine.core.lifecycle import ENDS, move
from tandem.engine.core.request import Request, Sequence
from tandem.engine.core.scheduler import Scheduler
from tandem.engine.core.scheduler_output import ScheduledPrefill
from tandem.engine.executor.model_runner import ModelRunner
from tandem.engine.metrics.stats_logger import StatsLogger
from tandem.engine.processing.answers import Answer, completion_of, finish_of, output_of
from tandem.engine.processing.outputs import RequestOutput, RequestTimes
from tandem.engine.processing.streaming import Streams
from tandem.engine.sample.logprobs import PromptLogprobs
from tandem.text.tokenizer import Tokenizer
from tandem.types import FinishReason


class OutputProcessor:
    """Collects completions until their request is finished. ``answers``: the unfinished requests by id. ``synchronous``: the ids of those
    whose steps cannot be launched ahead."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, tokenizer: Tokenizer | None, logger: StatsLogger) -> None:
        self.answers: dict[str, Answer] = {}
        self.synchronous: set[str] = set()
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._logger = logger
        self._ready: list[RequestOutput] = []
        self._streams = Streams(tokenizer)

    def open_sequences(self) -> list[Sequence]:
        """Returns the unfinished sequences of all requests."""
        return [sequence for answer in self.answers.values() for sequence in answer.open]

    def expect(self, request: Request, sequences: list[Sequence]) -> None:
        """Adds a request that has arrived, with its ``sequences``."""
        params = request.params
        answer = Answer(request, [None] * params.n, set(sequences), RequestTimes(time.monotonic()))
        self.answers[request.id] = answer
        if request.is_synchronous:
            self.synchronous.add(request.id)
        if params.prompt_logprobs is not None:
            answer.prompt_logprobs = PromptLogprobs(request.prompt_token_ids, params.prompt_logprobs)
            self._runner.prompt_logprobs[request.id] = answer.prompt_logprobs

    def note_scheduled(self, chunks: tuple[ScheduledPrefill, ...]) -> None:
        """Records that a step with these ``chunks`` was scheduled."""
        now = time.monotonic() if chunks else 0.0
        for chunk in chunks:
            times = self.answers[chunk.request_id].times
            times.scheduled_s = times.scheduled_s or now

    def note_first_tokens(self, chunks: tuple[ScheduledPrefill, ...]) -> None:
        """Records that a step has computed ``chunks``, from which requests may have drawn their first token."""
        now = time.monotonic() if chunks else 0.0
        for chunk in chunks:
            times = self.answers[chunk.request_id].times
            if chunk.rows and not times.first_token_s:
                times.first_token_s = now
                self._logger.record_first_token(now - times.arrival_s)

    def note_running(self) -> None:
        """Collects the new tokens of streamed requests after a step."""
        self._streams.running(self.answers, self._runner.batch, self._scheduler.kv_cache.weight_version)

    def end(self, sequence: Sequence) -> None:
        """Completes a sequence that has finished and left its row."""
        if sequence.request.params.max_tokens == 0:
            sequence.discard_output()
        self._complete(sequence, *finish_of(sequence))

    def abort(self, sequence: Sequence) -> None:
        """Completes an aborted sequence, which holds neither row nor blocks, with its tokens so far."""
        self._complete(sequence, FinishReason.ABORT, None)

    def _complete(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Records one completion; the last one finishes the request."""
        move(sequence, ENDS[reason], self._scheduler.counts)
        request = sequence.request
        answer = self.answers[request.id]
        completion = completion_of(sequence, reason, stop_reason, self._tokenizer)
        answer.completions[sequence.index] = completion
        answer.open.remove(sequence)
        answer.cached_tokens = max(answer.cached_tokens, sequence.num_cached_tokens)
        is_streamed = request.params.is_streamed
        if is_streamed:
            self._streams.ended(answer, completion, sequence)
        if not answer.open:
            del self.answers[request.id]
            self.synchronous.discard(request.id)
            self._runner.prompt_logprobs.pop(request.id, None)
            if not is_streamed:
                self._ready.append(output_of(answer, self._tokenizer))

    @property
    def has_news(self) -> bool:
        """Whether ``take`` has something to return."""
        return bool(self._ready or self._streams.has_news)

    def take(self) -> list[RequestOutput]:
        """Removes and returns the outputs of finished requests, and the new part of streamed ones."""
        ready, self._ready = self._ready, []
        return ready + self._streams.take()
