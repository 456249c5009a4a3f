"""The gateway as a process before backends that fail on command."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_process import FaultBackend, Gateway, fault_backend, gateway, until

from tandem.cli.main import main

Pair = tuple[Gateway, FaultBackend, FaultBackend]


class Reader:
    """A client that reads at its own pace and may leave."""

    def __init__(self, running: Gateway, body: dict[str, Any], headers: str = "") -> None:
        host, port = running.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=120)
        content = json.dumps({"model": "m", "prompt": "x", **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{headers}Content-Length: {len(content)}\r\n\r\n"
        self.socket.sendall(head.encode() + content)


def words(text: str) -> list[str]:
    """Returns the texts of a stream's events."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    return [event["choices"][0]["text"] for event in events if "choices" in event]


def test_an_answer_passes_through_as_it_is(pair: Pair) -> None:
    running, first, second = pair
    body = b'{"prompt":  "\\u00e9 x", "model":"m","max_tokens":3,  "unknown": [1.0, 1e5]}'
    for backend in (first, second):
        backend.mode("ok")
    asked = running.client.post(running.url + "/v1/completions?a=%2F1", content=body, headers={
        "Authorization": "Bearer client", "X-Request-Id": "mine", "Connection": "keep-alive, X-Hop", "X-Hop": "1", "X-Mine": "2",
    })  # fmt: skip
    assert asked.status_code == 200 and asked.json()["choices"][0]["text"] == "w0 w1 w2 "
    assert asked.headers["x-backend"] == "yes" and asked.headers["x-request-id"] == "mine" and "x-hop" not in asked.headers
    seen = max((first.stats(), second.stats()), key=lambda stats: stats["last"].get("body") == body.decode())
    last = seen["last"]
    assert last["body"] == body.decode() and last["path"] == "/v1/completions?a=%2F1", "bytes, not another writing of the same JSON"
    assert last["headers"]["authorization"] == "Bearer client" and last["headers"]["x-request-id"] == "mine" and last["headers"]["x-mine"] == "2"
    assert "x-hop" not in last["headers"] and last["headers"]["x-forwarded-for"] == "127.0.0.1"


def test_a_stream_comes_as_it_is_made(pair: Pair) -> None:
    running, first, second = pair
    for backend in (first, second):
        backend.mode("stall")
    with running.client.stream("POST", running.url + "/v1/completions", json={"model": "m", "prompt": "x", "stream": True, "max_tokens": 6}) as response:
        assert response.headers["content-type"] == "text/event-stream"
        text = ""
        for part in response.iter_text():
            text += part
            if len(words(text)) == 3:
                break
    assert words(text) == ["w0 ", "w1 ", "w2 "], "three events are here while the backend has not made the fourth"
    for backend in (first, second):
        backend.mode("ok")
    assert words(running.complete(stream=True, max_tokens=6).text) == [f"w{i} " for i in range(6)]


def test_a_body_of_220_kb_is_no_special_case(pair: Pair) -> None:
    running, first, second = pair
    prompt = "é😀" * 40_000
    assert running.complete(prompt=prompt, max_tokens=1).status_code == 200
    assert any(json.loads(backend.stats()["last"]["body"])["prompt"] == prompt for backend in (first, second))


def test_every_backend_gets_its_models_and_errors_have_openais_form(pair: Pair) -> None:
    running, first, _ = pair
    before = first.seen()
    assert all(running.complete("other").status_code == 200 for _ in range(4)) and first.seen() == before
    assert [model["id"] for model in running.get("/v1/models").json()["data"]] == ["m", "other"]
    assert running.get("/v1/models/other").json()["id"] == "other"
    wrong = running.complete("nothing")
    assert wrong.status_code == 404 and "there is m, other" in wrong.json()["error"]["message"] and wrong.json()["error"]["code"] == "model_not_found"
    for content, status in ((b"", 400), (b"{", 400), (b"[1]", 400), (b'{"model": 3}', 400), (b'{"prompt": "x"}', 400), (b"\xff", 400)):
        answer = running.client.post(running.url + "/v1/completions", content=content)
        assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}, (content, answer.text)
    assert running.get("/v1/completions").status_code == 405
    assert running.post("/pause").status_code == running.post("/v1/load_lora_adapter", {}).status_code == running.get("/nothing").status_code == 404


@pytest.mark.parametrize("mode", ["500", "502", "503", "429", "reset", "garbage", "truncated"])
def test_a_request_that_one_backend_fails_is_answered_by_the_other(pair: Pair, mode: str) -> None:
    running, first, second = pair
    before = first.seen(), second.seen()
    first.mode(mode)
    assert [running.complete().status_code for _ in range(2)] == [200, 200]
    assert first.seen() > before[0] and second.seen() >= before[1] + 2


def test_a_hung_backend_is_found_by_its_probes_and_its_requests_go_to_the_other(pair: Pair) -> None:
    running, first, _ = pair
    with ThreadPoolExecutor(4) as threads:
        first.mode("hang")
        asked = [threads.submit(running.complete) for _ in range(4)]
        assert [one.result().status_code for one in asked] == [200] * 4
    assert running.metric("backend_ready", backend="first") == 0
    assert "backend first is down (no answer within 1 s)" in running.log.read_text()
    assert "first" not in running.complete(who=True).json()["choices"][0]["text"]


def test_a_backend_that_is_not_ready_finishes_what_it_has_and_gets_nothing_new(pair: Pair) -> None:
    running, first, second = pair
    second.mode("ok", ready=False)
    until(lambda: running.metric("backend_ready", backend="second") == 0, "the probe")
    with running.client.stream("POST", running.url + "/v1/completions", json={"model": "m", "prompt": "x", "stream": True, "max_tokens": 40}) as response:
        first.mode("ok", ready=False, delay_s=0.02)
        until(lambda: running.metric("backend_ready", backend="first") == 0, "the probe")
        refused = running.complete()
        assert refused.status_code == 503 and refused.headers["retry-after"] == "2" and running.get("/readiness").status_code == 503
        assert words("".join(response.iter_text())) == [f"w{i} " for i in range(40)]


def test_a_request_that_all_backends_fail_at_is_to_blame_itself(pair: Pair) -> None:
    running, first, second = pair
    for backend in (first, second):
        backend.mode("500")
    for _ in range(12):
        answer = running.complete()
        assert answer.status_code == 500 and "says 500" in answer.json()["error"]["message"], "the backend's own words"
    assert running.metric("backend_breaker_open") == 0


@pytest.mark.parametrize(("stream", "prompt"), [(False, "x"), (True, "x"), (True, "long " * 60_000)])
def test_a_client_that_leaves_before_the_first_token_ends_the_work(pair: Pair, stream: bool, prompt: str) -> None:
    running, first, second = pair
    for backend in (first, second):
        backend.mode("deaf")
    before = first.seen("aborted") + second.seen("aborted")
    readers = [Reader(running, {"stream": stream, "prompt": prompt}) for _ in range(6)]
    until(lambda: first.stats()["running"] + second.stats()["running"] == 6, "the requests to be at the backends")
    for reader in readers:
        reader.socket.close()
    until(lambda: first.seen("aborted") + second.seen("aborted") == before + 6, "the backends to learn it")
    assert running.metric("requests_total", code="499") >= 6
    running.wait_idle()


def test_a_stream_that_breaks_off_ends_with_an_error_after_whole_events(pair: Pair) -> None:
    running, first, second = pair
    for mode in ("cut", "half_closed", "unfinished"):
        for backend in (first, second):
            backend.mode(mode)
        text = running.complete(stream=True, max_tokens=4).text
        *events, error, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert [json.loads(event)["choices"][0]["text"] for event in events] == [f"w{i} " for i in range(4 if mode == "unfinished" else 2)]
        assert "broke off" in json.loads(error)["error"]["message"] and done == "[DONE]"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, FaultBackend]]:
    """A gateway with one backend, short waits, small bodies and no retries."""
    settings = {
        "timeouts": {"first_byte_s": 0.4, "idle_s": 0.4}, "retry": {"attempts": 1}, "breaker": {"failures": 3, "open_s": 0.3}, "max_body_mib": 0.01,
        "request_s": 0.5,
    }  # fmt: skip
    with fault_backend("only") as backend, gateway(tmp_path_factory.mktemp("strict"), [backend], **settings) as running:
        yield running, backend


def test_a_breaker_opens_and_the_backend_is_used_again_when_it_works(strict: tuple[Gateway, FaultBackend]) -> None:
    running, backend = strict
    backend.mode("400")
    assert [running.complete().status_code for _ in range(10)] == [400] * 10
    assert running.metric("backend_breaker_open") == 0, "errors of clients do not open it"
    backend.mode("500")
    seen = [running.complete() for _ in range(8)]
    refused = [answer for answer in seen if answer.status_code == 503]
    assert seen[0].status_code == 500 and refused and int(refused[0].headers["retry-after"]) >= 1
    backend.mode("ok")
    until(lambda: running.complete().status_code == 200 and running.metric("backend_breaker_open") == 0, "the breaker to close")


def test_waits_for_a_silent_backend_end(strict: tuple[Gateway, FaultBackend]) -> None:
    running, backend = strict
    backend.mode("deaf")
    answer = running.complete()
    assert answer.status_code == 502 and "did not answer within 0.4 s" in answer.json()["error"]["message"]
    backend.mode("stall")
    text = running.complete(stream=True, max_tokens=4).text
    assert words(text) == ["w0 ", "w1 "] and "did not go on within 0.4 s" in text and text.endswith("data: [DONE]\n\n")
    backend.mode("ok")
    running.wait_idle()


def test_too_large_and_too_slow_requests_are_refused(strict: tuple[Gateway, FaultBackend]) -> None:
    running, backend = strict
    before = backend.seen()
    large = running.complete(prompt="x" * 20_000)
    assert large.status_code == 413 and large.json()["error"]["code"] == "request_too_large"
    host, port = running.url.removeprefix("http://").split(":")
    for sent, wanted in ((b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{", b"HTTP/1.1 408"), (b"POST /v1/compl", b"")):
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            slow.sendall(sent)
            assert slow.recv(4096)[:12] == wanted
    with socket.create_connection((host, int(port)), timeout=60) as both:
        # Two lengths of one body: another server could see two requests where this one sees one.
        both.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n")
        assert both.recv(4096)[:12] == b"HTTP/1.1 400"
    assert backend.seen() == before


def test_a_gateway_starts_before_its_backends_and_drains_on_sigterm(tmp_path: Path) -> None:
    with fault_backend("alive") as backend, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = type(backend)(backend.process, f"http://127.0.0.1:{taken.getsockname()[1]}", backend.client, "dead")
        with gateway(tmp_path, [dead, backend]) as running:
            assert "backend dead is down" in running.log.read_text() and "1 of 2 backends ready: m" in running.log.read_text()
            assert "libtorch" not in Path(f"/proc/{running.process.pid}/maps").read_text()
            backend.mode("ok", delay_s=0.05)
            with running.client.stream("POST", running.url + "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 20}) as response:
                running.process.send_signal(signal.SIGTERM)
                until(lambda: running.get("/readiness").status_code == 503, "the gateway to drain")
                refused = running.complete()
                assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
                assert len(words("".join(response.iter_text()))) == 20
            assert running.process.wait(60) == 0 and running.log.read_text().splitlines()[-1] == "tandem: stopped"


@pytest.mark.full
def test_ctrl_c_twice_cuts_off_what_is_left(tmp_path: Path) -> None:
    with fault_backend("slow") as backend, gateway(tmp_path, [backend]) as running:
        backend.mode("deaf")
        reader = Reader(running, {})
        until(lambda: backend.stats()["running"] == 1, "the request")
        os.kill(running.process.pid, signal.SIGINT)
        until(lambda: "draining: 1 requests" in running.log.read_text(), "the gateway to drain")
        assert running.stop(signal.SIGINT) == 1 and "1 requests were cut off" in running.log.read_text().splitlines()[-1]
        until(lambda: backend.stats()["running"] == 0, "the backend to learn it")
        reader.socket.close()


def test_check_says_what_is_there(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, first, second = pair
    assert main(["gateway", "--check", "--backends", f"{first.url},{second.url}"]) == 0
    assert capsys.readouterr() == (f"{first.url[7:]}: ready, serves m\n{second.url[7:]}: ready, serves m, other\n", "")
    file = tmp_path / "gateway.yaml"
    file.write_text(f"backends:\n  - {first.url}\n  - {{url: 'http://127.0.0.1:1', name: away}}\n")
    assert main(["gateway", str(file), "--check"]) == 1
    assert "backend away is down" in capsys.readouterr().out


def test_what_cannot_be_started_is_one_line(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running, *_ = pair
    file = tmp_path / "gateway.yaml"
    port = running.url.rpartition(":")[2]
    for text, arguments, says in (
        ("backends: [http://a:1]\nbalanse: x\n", [], "did you mean 'balance'"), ("[]", [], "has no settings"), ("a: [", [], "not valid YAML"),
        ("port: 1\n", [], "no backends"), ("backends: [http://a:1]\n", ["--port", port], f"port {port} on 127.0.0.1 cannot be taken"),
        ("backends: [{url: 'http://a:1', api_key_file: none}]\n", [], "cannot be read"),
    ):  # fmt: skip
        file.write_text(text)
        assert main(["gateway", str(file), *arguments]) == 2
        said = capsys.readouterr().err
        assert says in said and said.startswith("tandem: ") and len(said.splitlines()) == 1, said


@pytest.mark.full
def test_streams_with_disconnects_and_failing_backends_leave_nothing_behind(pair: Pair) -> None:
    running, first, _ = pair
    running.wait_idle()
    port = int(running.url.rpartition(":")[2])
    process = psutil.Process(running.process.pid)

    def of_clients() -> int:
        """Returns the connections to clients; those to backends are kept for the next requests."""
        return sum(each.laddr.port == port and each.status != psutil.CONN_LISTEN for each in process.net_connections())

    for mode in ["ok", "500", "cut", "reset", "stall", "garbage"] * 3:
        first.mode(mode, delay_s=0.001)
        readers = [Reader(running, {"stream": bool(i % 2), "max_tokens": 20}) for i in range(200)]
        for i, reader in enumerate(readers):
            if i % 3 == 0:
                reader.socket.recv(100 * (i % 5) + 1) if i % 2 and mode != "stall" else None
            reader.socket.close()
    first.mode("ok")
    running.wait_idle()
    until(lambda: of_clients() <= 2, "the sockets to be closed")
