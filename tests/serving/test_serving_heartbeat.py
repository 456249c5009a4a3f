"""Readiness follows the engines: one that is stopped is noticed, its requests end, and it serves again when it goes on."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_process import CONTROL, Server, server, until

from tandem.serving.engines.heartbeat import Heartbeat

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
TIMEOUT = ("--heartbeat-timeout", "0.5")


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(model, tmp_path_factory.mktemp("one"), "--max-num-seqs", "8", *TIMEOUT) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def stream(running: Server, prompt: str) -> tuple[list[int], list[str]]:
    """Returns the tokens of a stream and its last two events."""
    response = running.post("/v1/completions", {"prompt": prompt, "stream": True, "return_token_ids": True, **LONG})
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    return [token for event in parsed for choice in event.get("choices", ()) for token in choice["token_ids"]], events[-2:]


def begun(running: Server, count: int) -> None:
    until(lambda: running.metric("vllm:num_requests_running") == count, "the requests to run")


def test_a_stopped_engine_is_not_ready_its_requests_end_and_it_serves_again(one: Server) -> None:
    (engine,) = one.engines()
    expected, _ = stream(one, "the quick")
    one.control("/pause?mode=recompute")
    with ThreadPoolExecutor(2) as threads:
        whole = threads.submit(one.post, "/v1/completions", {"prompt": "whole", **LONG})
        streamed = threads.submit(stream, one, "streamed")
        until(lambda: one.metric("vllm:num_requests_waiting") == 2, "the requests to be held")
        os.kill(engine, signal.SIGSTOP)
        answer, (_, last) = whole.result(30), streamed.result(30)
        until(lambda: one.get("/readiness").status_code == 503, "the server not to be ready", limit_s=30)
    assert answer.status_code == 503 and "instance 0 has not answered for 0.5 s" in answer.json()["error"]["message"]
    assert last == [] or "has not answered" in last[0]
    assert one.get("/readiness").json() == {"status": "no engine answers"} and one.get("/health").status_code == 503
    assert one.get("/liveness").status_code == 200
    refused = one.post("/v1/completions", {"prompt": "x"})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
    assert one.post("/resume", headers=CONTROL).status_code == 503
    os.kill(engine, signal.SIGCONT)
    until(lambda: one.get("/readiness").status_code == 200, "the server to be ready", limit_s=30)
    one.control("/resume")
    assert one.engines() == [engine] and stream(one, "the quick")[0] == expected
    one.wait_idle()


def test_an_idle_engine_that_is_stopped_is_found_by_the_probe(one: Server) -> None:
    (engine,) = one.engines()
    os.kill(engine, signal.SIGSTOP)
    until(lambda: one.get("/readiness").status_code == 503, "the server not to be ready", limit_s=30)
    os.kill(engine, signal.SIGCONT)
    until(lambda: one.get("/readiness").status_code == 200, "the server to be ready", limit_s=30)


def test_an_engine_that_misses_a_control_call_is_replaced(one: Server) -> None:
    (engine,) = one.engines()
    os.kill(engine, signal.SIGSTOP)
    response = one.post("/pause?mode=recompute", headers=CONTROL)
    assert response.status_code == 503, response.text
    until(lambda: one.engines() not in ([engine], []) and one.get("/readiness").status_code == 200, "another engine")
    assert one.control_get("/is_paused") == {"is_paused": True}
    one.control("/resume")
    assert one.complete("x", max_tokens=2)["choices"]


@pytest.mark.full
def test_another_engine_takes_the_requests_of_a_stopped_one(model: Path, tmp_path: Path) -> None:
    with server(model, tmp_path, "--instances", "2", "--max-num-seqs", "4", *TIMEOUT) as running:
        prompts = [f"prompt {i}" for i in range(4)]
        expected = [stream(running, prompt)[0] for prompt in prompts]
        engine = running.engines()[0]
        running.control("/pause?mode=recompute")
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(stream, running, prompt) for prompt in prompts]
            until(lambda: running.metric("vllm:num_requests_waiting") == 4, "the requests to be held")
            running.control("/resume")
            os.kill(engine, signal.SIGSTOP)
            assert [one.result(60)[0] for one in asked] == expected
            assert running.get("/readiness").status_code == 200
        os.kill(engine, signal.SIGCONT)
        until(lambda: "answers again" in running.log.read_text() or "has not answered" not in running.log.read_text(), "the engine", limit_s=30)
        assert [stream(running, prompt)[0] for prompt in prompts] == expected
        assert "Traceback" not in running.log.read_text()


def test_silence_is_counted_from_a_question_and_ended_by_anything_that_is_heard() -> None:
    sent: list[int] = []
    heart = Heartbeat(2.0, 60.0, lambda: sent.append(1))
    assert heart.period_s == 0.5 and all(heart.tick(False) is None for _ in range(100)) and not sent, "an idle engine is not asked"
    assert heart.tick(True) is None and len(sent) == 1
    for _ in range(20):
        # A step takes the whole of several periods, but its outputs come.
        assert all(heart.tick(True) is None for _ in range(3))
        heart.heard()
    assert len(sent) == 1
    assert [heart.tick(True) for _ in range(4)] == [None, None, None, "has not answered for 2 s"]
    heart.answered(0.0)
    assert heart.tick(False) is None


def test_one_step_may_take_its_time_and_no_longer() -> None:
    heart = Heartbeat(2.0, 60.0, lambda: None)
    for seconds in range(0, 60, 5):
        assert heart.tick(True) is None
        heart.answered(float(seconds))
    assert heart.tick(True) is None
    heart.answered(61.0)
    assert heart.tick(True) == "has worked on one step for 61 s"
