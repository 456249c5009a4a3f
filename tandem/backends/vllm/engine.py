"""A server of vLLM as an engine that draws requests: the calls that groups, episodes and agents make of Tandem's own engine.

The seed of a completion depends on the run's seed, its request and its index, as in Tandem's engine, and not on the worker. The bits of vLLM's logits depend on
which other requests are in a batch, so that a completion which is drawn again may differ all the same.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from tandem.backends.vllm.generate import NOTHING, completion_of, generate_request, seed_of, times_of
from tandem.backends.vllm.http_client import Call
from tandem.backends.vllm.server import VllmServer
from tandem.engine.processing.outputs import CompletionOutput, Continuation, RequestOutput, RequestTimes
from tandem.engine.processing.prompt_check import check_prompt
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError, WeightVersion

STEP_S = 0.01
"""What a step waits for an answer: a tool that has returned meanwhile, or an agent's request, is to wait no longer."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request with ``waiting``: the calls of the server for its completions, by their indices, and the completions that are ``drawn``, with the ``times`` of
    each that vLLM has told."""

    id: str
    prompt: list[int]
    params: SamplingParams
    continues: Continuation
    version: WeightVersion
    seeds: list[int]
    waiting: dict[int, Call] = field(default_factory=dict)
    drawn: list[CompletionOutput] = field(default_factory=list)
    asked_s: float = field(default_factory=time.monotonic)
    times: list[RequestTimes] = field(default_factory=list)

    def output(self) -> RequestOutput:
        """Returns the output of the finished request: it was scheduled, and had a first token, when its first completion had."""
        told = bool(self.times)
        scheduled_s, first_token_s = (min(getattr(each, name) for each in self.times) if told else 0.0 for name in ("scheduled_s", "first_token_s"))
        times = RequestTimes(self.asked_s, scheduled_s, first_token_s) if told else None
        return RequestOutput(self.id, None, self.prompt, sorted(self.drawn, key=lambda completion: completion.index), times=times)


class VllmEngine:
    """Draws the completions of requests by a call of ``server`` for each, ``most`` at once. ``vocab_size``: of the model."""

    def __init__(self, server: VllmServer, tokenizer: Tokenizer, *, max_model_len: int, vocab_size: int, most: int) -> None:
        self.max_model_len = max_model_len
        self._server, self._tokenizer, self._vocab_size = server, tokenizer, vocab_size
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="vllm")
        self._answers: SimpleQueue[tuple[_Request, int, CompletionOutput | BaseException]] = SimpleQueue()
        self._requests: dict[str, _Request] = {}
        self._on_completion: Callable[[str, CompletionOutput], None] | None = None

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises ``UserError`` for a request that vLLM cannot serve."""
        check_prompt(prompt_token_ids, self.max_model_len, self._vocab_size, max_tokens=params.max_tokens)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, key: int, first_index: int = 0,
        continues: Continuation | None = None,
    ) -> None:
        """Sends a request, as ``Engine.add_request`` queues it. A completion that ``continues`` is drawn on with other random numbers than it would have been
        without the pause: vLLM keeps no state of them."""
        self.check_request(prompt_token_ids, params)
        if request_id in self._requests:
            raise UserError(f"request id {request_id!r} is in use; give every request an id of its own")
        assert self._server.version is not None, "weights come before requests"
        begun = continues or NOTHING
        seeds = [seed_of(params.seed or 0, key, first_index + index, len(begun.token_ids)) for index in range(params.n)]
        request = _Request(request_id, list(prompt_token_ids), params, begun, self._server.version, seeds)
        self._requests[request_id] = request
        for index in range(params.n):
            request.waiting[index] = Call()
            self._pool.submit(self._draw, request, index, request.waiting[index])

    def _draw(self, request: _Request, index: int, call: Call) -> None:
        try:
            room = self.max_model_len - len(request.prompt)
            body = generate_request(request.prompt, request.params, request.seeds[index], self._tokenizer.eos_token_ids, room, request.continues)
            answer = self._server.client.post("/inference/v1/generate", body, call)
            if (times := times_of(answer, request.asked_s, time.monotonic())) is not None:
                request.times.append(times)
            completion = completion_of(
                answer, f"completion {index} of {request.id}", index, len(request.prompt), request.params, self._tokenizer, request.version,
                request.continues, self._server.returns_routing,
            )  # fmt: skip
        except BaseException as error:
            self._answers.put((request, index, error))
        else:
            self._answers.put((request, index, completion))

    def step(self) -> list[RequestOutput]:
        """Waits a moment for an answer; returns the outputs of the requests that are finished. Raises ``EngineDied`` if the server ended or answered with
        anything but a completion that its weights drew."""
        finished = []
        for request, index, answer in self._new_answers():
            if self._requests.get(request.id) is not request:  # It was aborted.
                continue
            if isinstance(answer, BaseException):
                raise answer
            del request.waiting[index]
            request.drawn.append(answer)
            if self._on_completion is not None:
                self._on_completion(request.id, answer)
            if not request.waiting:
                del self._requests[request.id]
                finished.append(request.output())
        return finished

    def _new_answers(self) -> list[tuple[_Request, int, CompletionOutput | BaseException]]:
        answers = []
        try:
            answers.append(self._answers.get(timeout=STEP_S))
            while True:
                answers.append(self._answers.get_nowait())
        except Empty:
            return answers

    def listen(self, on_completion: Callable[[str, CompletionOutput], None] | None) -> None:
        """As ``Engine.listen``."""
        self._on_completion = on_completion

    def abort(self, request_id: str) -> bool:
        """Gives up a request, of which there is no output then. Returns False if there is no such unfinished request."""
        request = self._requests.pop(request_id, None)
        # The last ones first, which may still wait for a thread that one of the others has.
        for call in reversed(request.waiting.values()) if request is not None else ():
            call.give_up()
        return request is not None

    def take_outputs(self) -> list[RequestOutput]:
        """Returns none: an aborted request has no output."""
        return []

    def close(self) -> None:
        """Gives up every request, and ends the threads."""
        for name in list(self._requests):
            self.abort(name)
        self._pool.shutdown(wait=False, cancel_futures=True)
