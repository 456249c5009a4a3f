"""The spans of an engine's requests, under vLLM's names (https://docs.vllm.ai, ``SpanAttributes``): what a request waited for, and what was computed."""

import time
from dataclasses import dataclass

from tandem.engine.processing.outputs import RequestOutput, RequestTimes
from tandem.runtime.traces.context import SpanContext, parse_traceparent
from tandem.runtime.traces.spans import SPANS, Attributes, Span, Value, note
from tandem.serving.engines.messages import EngineRequest


@dataclass
class _Traced:
    parent: SpanContext
    request: EngineRequest
    tokens: int = 0


class TracedRequests:
    """The requests of an engine whose callers are traced; others cost one look-up."""

    def __init__(self) -> None:
        self._traced: dict[str, _Traced] = {}

    def add(self, request: EngineRequest) -> None:
        """Follows ``request`` from now on, if it has a ``traceparent`` of a sampled trace."""
        parent = parse_traceparent(request.traceparent) if request.traceparent else None
        if parent is not None and parent.sampled:
            self._traced[request.id] = _Traced(parent, request)

    def take(self, outputs: list[RequestOutput]) -> None:
        """Looks at the outputs of a step."""
        if self._traced:
            for output in outputs:
                traced = self._traced.get(output.request_id)
                if traced is not None:
                    traced.tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    if output.finished:
                        del self._traced[output.request_id]
                        _record(traced, output)

    def forget(self, request_ids: list[str]) -> None:
        """Ends requests that have no output."""
        for request_id in request_ids:
            self._traced.pop(request_id, None)


def _record(traced: _Traced, output: RequestOutput) -> None:
    times = output.times
    if times is None:
        return
    ended_s, request = time.monotonic(), traced.request
    # Times are those of the monotonic clock, which all processes of a machine share.
    epoch_ns = time.time_ns() - round(ended_s * 1e9)
    own = traced.parent.child()

    def at(seconds: float) -> int:
        return epoch_ns + round(seconds * 1e9)

    def part(name: str, start_s: float, end_s: float, attributes: Attributes | None = None) -> None:
        if start_s and end_s:
            note(name, own, at(start_s), at(end_s), attributes)

    reason = output.outputs[-1].finish_reason if output.outputs else None
    attributes: dict[str, Value] = {
        "gen_ai.request.id": request.id, "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids), "gen_ai.usage.completion_tokens": traced.tokens,
        "gen_ai.usage.num_sequences": int(request.params.get("n", 1)), "tandem.cached_tokens": output.num_cached_tokens,
        "tandem.preemptions": len(times.preemptions), "gen_ai.latency.e2e": ended_s - times.arrival_s,
    }  # fmt: skip
    attributes |= {f"gen_ai.request.{name}": value for name in ("max_tokens", "temperature", "top_p", "n") if (value := request.params.get(name)) is not None}
    attributes |= _latencies(times, ended_s)
    if reason is not None:
        attributes["gen_ai.response.finish_reason"] = reason
    SPANS.add(Span(own, traced.parent.span_id, "llm_request", "internal", at(times.arrival_s), at(ended_s), SPANS.process, attributes))
    part("queue", times.arrival_s, times.scheduled_s or ended_s)
    part("prefill", times.scheduled_s, times.first_token_s or (ended_s if times.scheduled_s else 0.0))
    part("decode", times.first_token_s, ended_s)
    for preemption in times.preemptions:
        part("preempted", preemption.at_s, preemption.again_s or ended_s, {"tandem.preemption": preemption.how})


def _latencies(times: RequestTimes, ended_s: float) -> dict[str, Value]:
    """Returns vLLM's latencies, in seconds, of a request that was computed."""
    if not times.scheduled_s or not times.first_token_s:
        return {}
    return {
        "gen_ai.latency.time_in_queue": times.scheduled_s - times.arrival_s, "gen_ai.latency.time_to_first_token": times.first_token_s - times.arrival_s,
        "gen_ai.latency.time_in_model_prefill": times.first_token_s - times.scheduled_s,
        "gen_ai.latency.time_in_model_decode": ended_s - times.first_token_s, "gen_ai.latency.time_in_model_inference": ended_s - times.scheduled_s,
    }  # fmt: skip
