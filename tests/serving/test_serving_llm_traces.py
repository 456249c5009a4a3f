"""Requests of ``LLM`` and ``AsyncLLM`` are traces, as a real OTLP receiver gets them."""

import asyncio
import os
from pathlib import Path

import pytest
from observability.otlp_receiver import GrpcReceiver, HttpReceiver, Received

from tandem import LLM, AsyncLLM, EngineArgs, SamplingParams, UserError
from tandem.runtime.traces.spans import SPANS, UNNAMED, Process

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"


def below(spans: list[Received], parent: Received) -> list[Received]:
    return [span for span in spans if span.parent_id == parent.span_id]


def test_each_request_of_an_llm_is_a_trace_with_its_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another test may have said what this process is.
    monkeypatch.setattr(SPANS, "process", Process(UNNAMED))
    with HttpReceiver() as receiver, GrpcReceiver() as other:
        with LLM(model, max_num_seqs=2, otlp_traces_endpoint=receiver.endpoint) as llm:
            with pytest.raises(UserError, match=f"{other.endpoint}.*{receiver.endpoint}"):
                LLM(model, otlp_traces_endpoint=other.endpoint, otlp_traces_protocol="grpc")
            plain = [output.outputs[0].token_ids for output in llm.generate(["the", "quick brown", "fox"], PARAMS)]
            with pytest.raises(RuntimeError, match="stop"):
                llm.generate("dropped", PARAMS, on_progress=lambda done, total: (_ for _ in ()).throw(RuntimeError("stop")))
        assert not SPANS.take() and other.port
        with LLM.from_engine_args(EngineArgs(model=str(model), otlp_traces_endpoint=other.endpoint, otlp_traces_protocol="grpc")) as llm:
            assert llm.generate("the", PARAMS)[0].outputs[0].token_ids == plain[0], "the same bits"
        with LLM(model) as llm:
            llm.generate("untraced", PARAMS)
    assert len(other.named("llm_request")) == 1 and not SPANS.take()
    requests = receiver.named("llm_request")
    assert len({span.trace_id for span in requests}) == len(requests) == 4 and {span.parent_id for span in requests} == {""}
    for request in requests:
        assert request.resource["service.name"] == "tandem-llm" and request.resource["process.pid"] == os.getpid()
        assert (request.attributes["gen_ai.usage.completion_tokens"], request.attributes["gen_ai.request.max_tokens"]) == (5, 5)
        queue, prefill, decode = sorted(below(receiver.spans, request), key=lambda span: (span.start_ns, span.end_ns))
        assert (queue.name, prefill.name, decode.name) == ("queue", "prefill", "decode")
        assert request.start_ns == queue.start_ns <= queue.end_ns == prefill.start_ns <= prefill.end_ns == decode.start_ns <= decode.end_ns == request.end_ns


@pytest.mark.parametrize("endpoint", ["nonsense", "http://user:secret@h:4318", "ftp://h"])
def test_an_address_that_is_none_is_refused_before_the_model_is_read(endpoint: str) -> None:
    with pytest.raises(UserError, match=r"engine otlp_traces_endpoint (is|has) "):
        LLM("no such folder", otlp_traces_endpoint=endpoint)
    with pytest.raises(UserError, match=r"engine otlp_traces_endpoint (is|has) "):
        AsyncLLM.from_engine_args(EngineArgs(model="no such folder", otlp_traces_endpoint=endpoint))


def test_a_protocol_without_an_address_is_refused() -> None:
    with pytest.raises(UserError, match=r"'engine\.otlp_traces_protocol' is 'grpc', .*; set engine\.otlp_traces_endpoint, or remove the key"):
        LLM("no such folder", otlp_traces_protocol="grpc")


@pytest.mark.full
def test_each_request_of_an_async_llm_is_in_the_trace_of_its_headers_or_one_of_its_own(model: Path) -> None:
    async def ask(engine: AsyncLLM) -> None:
        given = {"own": None, "given": {"TraceParent": f"{PARENT}-01"}, "not sampled": {"traceparent": f"{PARENT}-00"}, "bad": {"traceparent": "x"}}
        for name, headers in given.items():
            [_ async for _ in engine.generate("the quick", PARAMS, name, trace_headers=headers)]
        async for _ in engine.generate("left", SamplingParams(max_tokens=400, ignore_eos=True), "left"):
            break
        with pytest.raises(UserError):
            [_ async for _ in engine.generate({"prompt_token_ids": [10**6]}, PARAMS, "refused")]

    with HttpReceiver() as receiver:
        with AsyncLLM.from_engine_args(EngineArgs(model=str(model), max_num_seqs=4, otlp_traces_endpoint=receiver.endpoint)) as engine:
            asyncio.run(ask(engine))
        spans = {span.attributes["gen_ai.request.id"]: span for span in receiver.named("generate")}
        assert spans.keys() >= {"own", "given", "bad", "left"} and "not sampled" not in spans
        assert (spans["given"].trace_id, spans["given"].parent_id) == (PARENT[3:35], PARENT[36:])
        assert spans["own"].parent_id == spans["bad"].parent_id == "" and len({span.trace_id for span in spans.values()}) == len(spans)
        for name in ("own", "given", "bad"):
            [request] = below(receiver.spans, spans[name])
            assert request.name == "llm_request" and request.resource["process.pid"] != os.getpid() == spans[name].resource["process.pid"]
            assert {span.name for span in below(receiver.spans, request)} == {"queue", "prefill", "decode"}
    assert not SPANS.take()
