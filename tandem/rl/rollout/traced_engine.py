"""The spans of what a rollout asks its engine, Tandem's or another: each request below the episode, or the call, that it is drawn for."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tandem.engine.processing.outputs import CompletionOutput, Continuation, RequestOutput, RequestTimes
from tandem.engine.processing.request_spans import record_request
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.rl.rollout.sampling_engine import SamplingEngine
from tandem.runtime.traces.context import SpanContext


@dataclass(frozen=True, slots=True)
class _Asked:
    parent: SpanContext
    prompt_tokens: int
    params: SamplingParams
    begun: int
    added_s: float


class TracedEngine:
    """``engine`` with the spans of its requests. ``parent``: returns the span that a request which is added now is recorded below, ``None`` for none."""

    def __init__(self, engine: SamplingEngine, parent: Callable[[], SpanContext | None]) -> None:
        self._engine, self._parent = engine, parent
        self._asked: dict[str, _Asked] = {}

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._engine.check_request(prompt_token_ids, params)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, key: int, first_index: int = 0,
        continues: Continuation | None = None,
    ) -> None:  # fmt: skip
        self._engine.add_request(request_id, prompt_token_ids, params, key=key, first_index=first_index, continues=continues)
        parent = self._parent()
        if parent is not None and parent.sampled:
            begun = 0 if continues is None else len(continues.token_ids)
            self._asked[request_id] = _Asked(parent, len(prompt_token_ids), params, begun, time.monotonic())

    def step(self) -> list[RequestOutput]:
        outputs = self._engine.step()
        if self._asked:
            for output in outputs:
                self._ended(output)
        return outputs

    def _ended(self, output: RequestOutput) -> None:
        asked = self._asked.pop(output.request_id, None)
        if asked is not None:
            tokens = sum(len(completion.token_ids) for completion in output.outputs) - asked.begun
            times = output.times or RequestTimes(asked.added_s)
            record_request(asked.parent, output.request_id, asked.prompt_tokens, asdict(asked.params), tokens, output, times)

    def listen(self, on_completion: Callable[[str, CompletionOutput], None] | None) -> None:
        self._engine.listen(on_completion)

    def abort(self, request_id: str) -> bool:
        self._asked.pop(request_id, None)
        return self._engine.abort(request_id)

    def take_outputs(self) -> list[RequestOutput]:
        return self._engine.take_outputs()
