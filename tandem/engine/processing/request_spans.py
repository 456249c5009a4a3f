"""The spans of an engine's requests, under vLLM's names (https://docs.vllm.ai, ``SpanAttributes``): what a request waited for, and what was computed."""

import time
from collections.abc import Mapping
from typing import Any

from tandem.engine.processing.outputs import RequestOutput, RequestTimes
from tandem.runtime.traces.context import SpanContext
from tandem.runtime.traces.spans import SPANS, Attributes, Span, Value, note


def record_request(
    parent: SpanContext, request_id: str, prompt_tokens: int, params: Mapping[str, Any], tokens: int, output: RequestOutput, times: RequestTimes
) -> None:
    """Records a request that has ended with ``output`` as a child of ``parent``. ``params``: of its sampling, by name; ``tokens``: that it has drawn."""
    ended_s = time.monotonic()
    # Times are those of the monotonic clock, which all processes of a machine share.
    epoch_ns = time.time_ns() - round(ended_s * 1e9)
    own = parent.child()

    def at(seconds: float) -> int:
        return epoch_ns + round(seconds * 1e9)

    def part(name: str, start_s: float, end_s: float, attributes: Attributes | None = None) -> None:
        if start_s and end_s:
            note(name, own, at(start_s), at(end_s), attributes)

    reason = output.outputs[-1].finish_reason if output.outputs else None
    attributes: dict[str, Value] = {
        "gen_ai.request.id": request_id, "gen_ai.usage.prompt_tokens": prompt_tokens, "gen_ai.usage.completion_tokens": tokens,
        "gen_ai.usage.num_sequences": int(params.get("n", 1)), "tandem.cached_tokens": output.num_cached_tokens,
        "tandem.preemptions": len(times.preemptions), "gen_ai.latency.e2e": ended_s - times.arrival_s,
    }  # fmt: skip
    attributes |= {f"gen_ai.request.{name}": value for name in ("max_tokens", "temperature", "top_p", "n") if (value := params.get(name)) is not None}
    attributes |= _latencies(times, ended_s)
    if reason is not None:
        attributes["gen_ai.response.finish_reason"] = str(reason)
    SPANS.add(Span(own, parent.span_id, "llm_request", "internal", at(times.arrival_s), at(ended_s), SPANS.process, attributes))
    # An engine of another library may say no more than when its request was asked for and had ended.
    if times.scheduled_s or output.times is not None:
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
