"""The trace of a call over process boundaries, and the rules of W3C and OpenTelemetry for its ids."""

import os
import threading
from pathlib import Path

import pytest
from observability.otlp_receiver import HttpReceiver
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem.config.traces import TracesConfig
from tandem.runtime.process.processes import Threads
from tandem.runtime.process.worker import Worker
from tandem.runtime.rpc.calls import RemoteError
from tandem.runtime.rpc.http_client import HttpClient
from tandem.runtime.rpc.http_server import HttpServer
from tandem.runtime.rpc.rpc_client import RpcClient
from tandem.runtime.rpc.rpc_server import RpcServer
from tandem.runtime.rpc.traced import receive_spans, sent_with
from tandem.runtime.traces.context import SpanContext, current, in_context, is_sampled, new_trace, parse_traceparent
from tandem.runtime.traces.exporter import BATCH, Exporter
from tandem.runtime.traces.parts import Parts, share_of_parts
from tandem.runtime.traces.spans import SPANS, Spans, begin_first, from_json, span, to_json
from tandem.runtime.traces.steps import trace_of_step

HELPERS = str(Path(__file__).parent / "helpers")
HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("text", [
    HEADER, HEADER[:-2] + "00", "cc" + HEADER[2:] + "-more", "ff" + HEADER[2:], HEADER + "-more", HEADER.upper(), "00-" + "0" * 32 + HEADER[35:],
    HEADER[:36] + "0" * 16 + "-01", "", "garbage", HEADER[:-1], "00-\u0661" + HEADER[4:],
])  # fmt: skip
def test_a_traceparent_is_read_as_opentelemetry_reads_it(text):
    read = TraceContextTextMapPropagator().extract({"traceparent": text})
    [other] = read.values() or [None]
    mine = parse_traceparent(text)
    if other is None:
        assert mine is None
    else:
        theirs = other.get_span_context()
        assert (int(mine.trace_id, 16), int(mine.span_id, 16), mine.sampled) == (theirs.trace_id, theirs.span_id, theirs.trace_flags.sampled)


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.37, 1.0])
def test_a_trace_is_sampled_as_opentelemetry_samples_it(ratio):
    theirs = TraceIdRatioBased(ratio)
    for trace_id in (os.urandom(16).hex() for _ in range(2000)):
        assert is_sampled(trace_id, ratio) == (theirs.should_sample(None, int(trace_id, 16), "x").decision.is_sampled())
    assert abs(sum(new_trace(ratio).sampled for _ in range(4000)) / 4000 - ratio) < 0.04


def test_a_span_crosses_to_a_worker_and_its_spans_come_back_with_the_answer(tmp_path):
    worker = Worker("worker", "channel_worker", threads=Threads(1), output=tmp_path / "log", environment={"PYTHONPATH": HELPERS})
    try:
        SPANS.take()
        worker.call("echo", deadline_s=20)
        assert not SPANS.take(), "nothing is recorded where no trace is"
        with pytest.raises(RemoteError), begin_first("first", SpanContext("a" * 32, "b" * 16)) as first:
            worker.call("echo", {"progress": 2}, deadline_s=20)
            worker.call("fail", {"kind": "ValueError", "text": "odd"}, deadline_s=20)
        echo, fail, own = SPANS.take()
        assert (echo.name, fail.name, own.name) == ("echo", "fail", "first") and own.context == first.context
        assert {echo.process.pid, fail.process.pid} == {worker.pid} and own.process.pid == os.getpid()
        assert echo.parent_id == fail.parent_id == "b" * 16 and {echo.context.trace_id, fail.context.trace_id} == {"a" * 32}
        assert (echo.error, fail.error, own.error[:12]) == ("", "ValueError: odd", "RemoteError:")
        assert own.start_ns <= echo.start_ns <= echo.end_ns <= fail.end_ns <= own.end_ns
        with begin_first("not sampled", SpanContext("a" * 32, "b" * 16, sampled=False)) or span("none") as opened:
            worker.call("echo", deadline_s=20)
        assert opened is None and not SPANS.take()
    finally:
        worker.stop()


@pytest.mark.parametrize(("kind", "client"), [(RpcServer, RpcClient), (HttpServer, HttpClient)])
def test_a_call_of_a_sidecar_carries_its_trace_over_tcp_and_http(kind, client):
    seen = []

    def work(meta, blobs, progress):
        seen.append(current())
        return {}, {}

    server = kind({"work": work}, "secret", name="sidecar")
    server.start()
    try:
        SPANS.take()
        calls = client("sidecar", server.port, "secret")
        calls.call("work", deadline_s=20)
        with begin_first("first", SpanContext("a" * 32, "b" * 16)):
            calls.call("work", deadline_s=20)
        outside, inside = seen
        spans = {span.name: span for span in SPANS.take()}
        assert outside is None and (inside.trace_id, spans["work"].parent_id, spans["work"].context) == ("a" * 32, "b" * 16, inside)
        assert set(spans) == {"work", "first"}
    finally:
        server.close()


def test_what_another_process_could_not_keep_is_counted_here():
    before = SPANS.dropped
    with begin_first("first", SpanContext("a" * 32, "b" * 16)):
        pass
    SPANS.dropped += 3
    _, sent = sent_with("result")
    assert SPANS.dropped == 0 and sent[-1] == before + 3 and len(sent) == 2
    receive_spans([*sent, "not a span", ["no span either"], -5])
    assert sent_with("result") == ("", [sent[0], ["no span either"], before + 4]), "what is passed on is not read"
    receive_spans([sent[0], ["no span either"], before + 4])
    assert len(SPANS.take()) == 1 and SPANS.dropped == before + 5
    SPANS.dropped = before


def test_a_thread_has_the_span_that_it_was_given_and_no_other(tmp_path):
    seen = []
    with begin_first("first", SpanContext("a" * 32, "b" * 16)):
        for target in (in_context(lambda: seen.append(current())), lambda: seen.append(current())):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert seen == [SpanContext("a" * 32, "b" * 16), None] and current() is None
    SPANS.take()


def test_spans_beyond_the_limit_are_counted_and_those_of_other_processes_are_checked():
    spans = Spans(limit=2)
    with begin_first("first", SpanContext("a" * 32, "b" * 16)) as first:
        first.update({"n": 1, "s": "x", "f": 0.5, "b": True})
        first.event("preempted", {"by": "swap"})
    [one] = SPANS.take()
    for _ in range(5):
        spans.add(one)
    assert (len(spans), spans.dropped) == (2, 3)
    assert from_json(to_json(one)) == one
    for broken in (None, [], 1, ["a" * 31], [*to_json(one)[:-1], ["x"]], ["z" * 32, *to_json(one)[1:]], [*to_json(one)[:4], 9, *to_json(one)[5:]]):
        with pytest.raises(ValueError, match=r"not a span|invalid literal"):
            from_json(broken)


def test_of_many_parts_of_a_call_the_first_and_a_share_are_recorded_with_all_that_belongs_to_them():
    parts, call = Parts(), SpanContext("a" * 32, "b" * 16)
    assert parts.parent() is None and parts.choose() is None, "nothing has begun"
    with begin_first("rollout", call):
        parts.begin(call, 0.0)
        assert [parts.parent() for _ in range(50)] == [call] + [None] * 49
        again = call.child()
        parts.begin(again, 0.0)
        assert parts.choose() is None, "another call of the same step has no further first part"
        parts.begin(SpanContext("c" * 32, "b" * 16), 0.0)
        assert parts.choose() is not None, "another step has one"
        parts.begin(call, 1.0)
        assert [parts.choose() for _ in range(50)] == [call] * 50
        parts.begin(call, 0.01)
        assert 10 < sum(parts.choose() is not None for _ in range(5000)) < 150
        parts.begin(call, 0.0)
        with span("episode") as episode, span("turn"):
            assert parts.parent() == current() != episode.context, "what belongs to a part is no part"
        parts.begin(SpanContext("d" * 32, "b" * 16, sampled=False), 1.0)
        assert parts.choose() is None
    SPANS.take()


@pytest.mark.parametrize(("section", "is_whole", "share"), [(None, False, 1.0), ({}, False, 0.01), ({}, True, 1.0), ({"sample_ratio": 0.2}, False, 0.2)])
def test_the_share_of_the_parts_is_that_of_requests_unless_the_recipe_says_otherwise(section, is_whole, share):
    assert share_of_parts(None if section is None else TracesConfig(**section), is_whole=is_whole) == share


def test_spans_are_sent_when_there_are_many_and_at_the_end():
    with HttpReceiver() as receiver:
        exporter = Exporter(TracesConfig(receiver.endpoint), spans := Spans())
        with begin_first("one", SpanContext("a" * 32, "b" * 16)):
            pass
        [one] = SPANS.take()
        for number in range(BATCH + 1):
            spans.add(to_json(one) if number % 2 else one)
        spans.add(["no span"])
        exporter.close()
        assert len(receiver.spans) == BATCH + 1 and len({(each.name, str(each.resource)) for each in receiver.spans}) == 1
    assert len(receiver.paths) >= 2 and spans.dropped == 1


def test_a_step_has_the_same_trace_in_every_process_and_attempt_and_no_other_step_has_it(tmp_path):
    first, again, ranks = trace_of_step(tmp_path, 3), trace_of_step(tmp_path, 3), [trace_of_step(tmp_path, 3, attempt="from step 0") for _ in range(2)]
    assert first.trace_id == again.trace_id == ranks[0].trace_id and first.span_id != again.span_id and ranks[0] == ranks[1]
    assert len({trace_of_step(tmp_path, step).trace_id for step in range(100)} | {trace_of_step(tmp_path / "other", 3).trace_id}) == 101
