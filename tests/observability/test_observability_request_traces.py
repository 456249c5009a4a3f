"""One trace from the gateway to the engine, as a real OTLP receiver gets it; sampling; and collectors that are down, slow or answer nonsense."""

import itertools
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gateway_process import Gateway, gateway
from http_processes import until
from otlp_receiver import GrpcReceiver, HttpReceiver, Received
from server_process import Server, server
from tiny_model import make_model, make_tokenizer

from tandem.config.traces import TracesConfig
from tandem.runtime.traces.context import SpanContext
from tandem.runtime.traces.exporter import SENT, Exporter
from tandem.runtime.traces.spans import SPANS, Span, Spans

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SERVER = 2
CLIENT = 3


@dataclass
class System:
    receiver: HttpReceiver
    server: Server
    gateway: Gateway
    logs: Path

    def trace(self, id: str, spans: int) -> dict[str, Received]:
        """Waits for ``spans`` spans of the trace ``id``, and returns them by their ids."""
        until(lambda: len(self.receiver.traces().get(id, [])) >= spans, f"{spans} spans of {id}")
        return {span.span_id: span for span in self.receiver.traces()[id]}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("traces")
    make_model(folder / "model", make_tokenizer(folder / "tokenizer"), 0)
    # A cache in which two long answers do not fit at once, so that one is preempted.
    small = ("--kv-cache-tokens", "128", "--max-model-len", "96")
    with (
        HttpReceiver() as receiver,
        server(folder / "model", folder, "--otlp-traces-endpoint", receiver.endpoint, "--log-folder", str(folder / "log"), *small) as served,
        gateway(folder, [served], traces={"endpoint": f"{receiver.endpoint}/custom/path"}, log_folder=str(folder / "log")) as before,
    ):
        until(lambda: before.get("/readiness").status_code == 200, "the gateway to be ready")
        yield System(receiver, served, before, folder / "log")


def complete(system: System, flags: str = "01", trace: str = TRACE, **fields: Any) -> int:
    headers = {"traceparent": f"00-{trace}-{PARENT}-{flags}"} if flags else {}
    body = {"model": str(system.server.get("/v1/models").json()["data"][0]["id"]), "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, **fields}
    return system.gateway.post("/v1/completions", body, headers=headers).status_code


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_one_trace_from_the_gateway_to_the_engine(system: System, stream: bool) -> None:
    id = ("a" if stream else "b") * 32
    assert complete(system, trace=id, stream=stream, ignore_eos=True) == 200
    spans = system.trace(id, 11)
    by_name = {(span.resource["service.name"], span.name): span for span in spans.values()}

    def path(span: Received) -> list[str]:
        return [span.name] if span.parent_id == PARENT else [*path(spans[span.parent_id]), span.name]

    whole = by_name["tandem-gateway", "POST /v1/completions"]
    assert whole.parent_id == PARENT and whole.kind == SERVER and whole.status != 2
    assert {name for (service, name), span in by_name.items() if service == "tandem-gateway" and span.parent_id == whole.span_id} == {
        "auth", "read", "queue", "route", "attempt",
    }  # fmt: skip
    attempt, served = by_name["tandem-gateway", "attempt"], by_name["tandem-server", "POST /v1/completions"]
    assert attempt.kind == CLIENT and served.parent_id == attempt.span_id and attempt.attributes["tandem.outcome"] == "success"
    request = by_name["tandem-engine", "llm_request"]
    assert path(request) == ["POST /v1/completions", "attempt", "POST /v1/completions", "llm_request"]
    parts = [by_name["tandem-engine", name] for name in ("queue", "prefill", "decode")]
    assert all(part.parent_id == request.span_id for part in parts)
    assert all(before.end_ns == after.start_ns for before, after in itertools.pairwise(parts)), "one follows the other"
    assert request.start_ns == parts[0].start_ns and request.end_ns == parts[-1].end_ns
    pids = [span.resource["process.pid"] for span in (whole, served, request)]
    assert pids == [system.gateway.process.pid, system.server.process.pid, *system.server.engines()]

    given = {**whole.attributes, **request.attributes}
    for name, value in {
        "gen_ai.operation.name": "text_completion", "http.response.status_code": 200, "http.request.method": "POST", "url.path": "/v1/completions",
        "gen_ai.usage.prompt_tokens": 3, "gen_ai.usage.completion_tokens": 4, "gen_ai.request.max_tokens": 4, "gen_ai.request.stream": stream,
        "tandem.preemptions": 0, "gen_ai.response.finish_reason": "length",
    }.items():  # fmt: skip
        assert given[name] == value, name
    if not stream:
        assert (given["gen_ai.usage.input_tokens"], given["gen_ai.usage.output_tokens"]) == (3, 4)
    seconds = given["gen_ai.latency.time_in_queue"] + given["gen_ai.latency.time_in_model_inference"]
    assert seconds == pytest.approx(given["gen_ai.latency.e2e"]) == pytest.approx((request.end_ns - request.start_ns) / 1e9, abs=1e-6)
    assert "/custom/path" in system.receiver.paths and "/v1/traces" in system.receiver.paths


@pytest.mark.full
def test_a_trace_that_its_client_does_not_sample_is_recorded_nowhere(system: System) -> None:
    assert complete(system, "00", "c" * 32) == 200
    assert complete(system, "01", "d" * 32) == 200
    system.trace("d" * 32, 11)
    assert "c" * 32 not in system.receiver.traces()


@pytest.mark.full
def test_a_refused_request_says_why_in_its_span(system: System) -> None:
    assert system.gateway.post("/v1/completions", {"prompt": 7, "model": 3}, headers={"traceparent": f"00-{'e' * 32}-{PARENT}-01"}).status_code == 400
    whole = next(span for span in system.trace("e" * 32, 2).values() if span.kind == SERVER)
    assert whole.attributes["http.response.status_code"] == 400 and "'model' is not a text" in whole.attributes["error.message"]


@pytest.mark.full
def test_preemptions_are_spans_of_their_requests(system: System) -> None:
    ids = [f"{number:032x}" for number in range(1, 7)]
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(complete, system, "01", id, max_tokens=60, ignore_eos=True, prompt=[int(id, 16)] * 20) for id in ids]
        assert {answer.result() for answer in answers} == {200}
    traces = [system.trace(id, 11) for id in ids]
    until(lambda: system.receiver.named("preempted"), "a preemption")
    preempted = system.receiver.named("preempted")
    requests = {span.span_id: span for trace in traces for span in trace.values() if span.name == "llm_request"}
    assert sum(int(span.attributes["tandem.preemptions"]) for span in requests.values()) == len(preempted) == system.server.metric("vllm:num_preemptions_total")
    for span in preempted:
        request = requests[span.parent_id]
        assert request.start_ns < span.start_ns < span.end_ns <= request.end_ns and span.attributes["tandem.preemption"] in ("recompute", "swap_out")


@pytest.mark.full
def test_the_line_of_a_request_has_its_trace_in_the_log_files_and_the_terminal_stays_readable(system: System) -> None:
    assert complete(system, trace="f" * 32) == 200
    for process, role in ((system.server, "server"), (system.gateway, "gateway")):
        (file,) = system.logs.glob(f"{role}-*.log")
        assert file.stem == f"{role}-{process.url.rpartition(':')[2].strip('/')}"

        def lines(file: Path = file) -> list[Any]:
            return [line for line in map(json.loads, file.read_text().splitlines()) if line.get("trace_id") == "f" * 32]

        until(lines, "the line of the request")
        (line,) = lines()
        assert (line["role"], line["level"]) == (role, "INFO") and '"POST /v1/completions" 200' in line["message"] and "run" not in line
        assert f"tandem: {line['message']}\n" in process.log.read_text() and "trace_id" not in process.log.read_text()


@pytest.mark.full
def test_the_counts_of_spans_are_in_metrics(system: System) -> None:
    for process, prefix in ((system.gateway, ""), (system.server, "")):
        until(lambda: process.series(f"{prefix}tandem_traces_exported_spans_total") > 0, "exported spans")  # noqa: B023
        assert process.series("tandem_traces_dropped_spans_total") == 0


# -- the exporter ----------------------------------------------------------------------------------------------------------


def span_of(number: int) -> Span:
    return Span(SpanContext("a" * 32, f"{number + 1:016x}"), "", f"span {number}", "internal", 10**18, 10**18 + 5, SPANS.process, {"n": number})


@pytest.fixture
def counts() -> Iterator[None]:
    before = (SENT.exported, SENT.failed, SPANS.dropped)
    SENT.exported = SENT.failed = SPANS.dropped = 0
    yield
    SENT.exported, SENT.failed, SPANS.dropped = before


def test_grpc_brings_the_same_spans_as_http(counts: None) -> None:
    received = []
    for kind, protocol in ((HttpReceiver, "http/protobuf"), (GrpcReceiver, "grpc")):
        with kind() as receiver:
            spans = Spans()
            exporter = Exporter(TracesConfig(receiver.endpoint, protocol), spans)
            for number in range(1500):
                spans.add(span_of(number))
            exporter.close()
            received.append(sorted(receiver.spans, key=lambda span: span.span_id))
    assert received[0] == received[1] and [span.attributes["n"] for span in received[0]] == list(range(1500))
    assert (SENT.exported, SENT.dropped) == (3000, 0)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("collector", ["down", "silent", "garbage"])
def test_a_collector_that_does_not_work_costs_spans_and_nothing_else(collector: str, protocol: Any, counts: None, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if collector == "garbage":
            threading.Thread(target=_answer_garbage, args=(listener,), daemon=True).start()
        if collector == "down":
            listener.close()
        spans = Spans()
        exporter = Exporter(TracesConfig(f"http://127.0.0.1:{port}", protocol, timeout_s=0.5, max_queue_size=600), spans)
        began = time.perf_counter()
        for number in range(5000):
            spans.add(span_of(number))
        recorded = time.perf_counter() - began
        exporter.close()
        assert time.perf_counter() - began < 6
    # A silent collector takes the whole timeout of each batch of 512.
    assert recorded < 4.5, "recording a span does not wait"
    assert SENT.exported == 0 and SENT.failed + spans.dropped == 5000, "every span is counted"
    assert len(re.findall("did not receive", caplog.text)) == 1, "it is told once"


def _answer_garbage(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(65536)
            connection.sendall(os.urandom(2000))


def test_a_collector_that_comes_later_gets_what_is_recorded_then(counts: None) -> None:
    with HttpReceiver() as receiver:
        receiver.status = 400
        spans = Spans()
        exporter = Exporter(TracesConfig(receiver.endpoint), spans)
        spans.add(span_of(0))
        until(lambda: SENT.failed == 1, "the loss")
        receiver.status = 200
        spans.add(span_of(1))
        until(lambda: SENT.exported == 1, "the next batch")
        exporter.close()
    assert [span.name for span in receiver.spans] == ["span 1"]
