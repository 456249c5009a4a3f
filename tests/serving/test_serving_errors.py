"""Invalid input: the right status, OpenAI's format, and a server that keeps running."""

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import CONTROL, Server, server, until

TEXT = {"Content-Type": "application/json"}


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and "\n" not in error["message"]
    return dict(error)


@pytest.fixture(scope="module", autouse=True)
def still_alive(shared: Server) -> Any:
    yield
    assert shared.complete("x", max_tokens=1)["choices"]


def test_audio_and_images_are_refused_in_one_line(shared: Server) -> None:
    for path in ("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/images/generations"):
        error = refusal(httpx.post(shared.url + path, json={"input": "a", "prompt": "a"}, timeout=60), 404)
        assert error["message"] == f"there is no {path}: the models read and write text alone" and error["code"] == "not_supported"
    uploaded = httpx.post(f"{shared.url}/v1/audio/transcriptions", files={"file": b"RIFF"}, data={"model": "tiny"}, timeout=60)
    assert refusal(uploaded, 404)["code"] == "not_supported"


def test_ping_and_load_are_those_of_vllm(shared: Server) -> None:
    assert httpx.get(f"{shared.url}/ping").status_code == httpx.post(f"{shared.url}/ping").status_code == 200
    until(lambda: shared.get("/load").json() == {"server_load": 0}, "no request to be in flight")
    shared.control("/pause?mode=recompute")
    try:
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(shared.complete, "the", max_tokens=1)
            until(lambda: shared.get("/load").json() == {"server_load": 1}, "the request to be in flight")
            shared.control("/resume")
            assert answer.result()["choices"]
    finally:
        shared.control("/resume")
    until(lambda: shared.get("/load").json() == {"server_load": 0}, "the request to be over")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"prompt": "\xff\xfe"}', b'"text"', b"[]", b"null", b"[" * 100_000, b'{"prompt": ' + b"9" * 10_000 + b"}"],
    ids=lambda body: repr(body[:12]),
)
def test_what_is_no_json_object_is_400(shared: Server, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"):
        refusal(httpx.post(shared.url + path, content=body, headers=TEXT, timeout=60), 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, None),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [300]}, None),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": "x" * 50_000}, "prompt"),
        ({"prompt": [5] * 512}, None),
        ({"prompt": [5] * 513}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": 10**20}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"seed": 2**70}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"min_tokens": 20, "max_tokens": 5}, "min_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_json": {"type": "object"}, "guided_regex": "a"}, "guided_json"),
        ({"structured_outputs": {"regex": "("}}, None),
        ({"structured_outputs": {"nothing": 1}}, None),
        ({"stream": "yes"}, "stream"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_wrong_field_is_400_and_named(shared: Server, fields: dict[str, Any], param: str | None) -> None:
    error = refusal(shared.post("/v1/completions", {"prompt": "x", **fields}), 400)
    assert error["type"] == "invalid_request_error" and error["param"] == param


def test_a_stream_that_is_refused_has_the_same_status(shared: Server) -> None:
    for fields, param in (({"stop_token_ids": [300]}, "stop_token_ids"), ({"n": 2, "temperature": 0}, "n"), ({"prompt": [5] * 512}, None)):
        error = refusal(shared.post("/v1/completions", {"prompt": "x", "stream": True, **fields}), 400)
        assert error["param"] == param
    assert refusal(shared.post("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}), 400)["param"] == "stream_options"


@pytest.mark.parametrize("text", ['{"prompt": "x", "temperature": NaN}', '{"prompt": "x", "top_p": Infinity}', '{"prompt": "x", "logit_bias": {"5": NaN}}'])
def test_numbers_that_are_none_are_400(shared: Server, text: str) -> None:
    refusal(httpx.post(f"{shared.url}/v1/completions", content=text, headers=TEXT), 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_wrong_chat_is_400_and_named(shared: Server, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    assert refusal(shared.post("/v1/chat/completions", body), 400)["param"] == param


def test_unknown_fields_are_accepted_and_unknown_models_and_pages_are_404(shared: Server) -> None:
    assert shared.complete("x", max_tokens=1, no_such_field={"deep": [1]}, user="me")["choices"]
    error = refusal(shared.post("/v1/completions", {"model": "gpt-9", "prompt": "x"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    refusal(shared.get("/v1/models/gpt-9"), 404)
    refusal(shared.get("/nowhere"), 404)
    wrong = shared.get("/v1/completions")
    assert refusal(wrong, 405) and wrong.headers["allow"] == "POST"


def test_ten_megabytes_are_413_however_they_are_sent(shared: Server) -> None:
    big = json.dumps({"prompt": "x" * (10 * 2**20)}).encode()
    assert refusal(httpx.post(f"{shared.url}/v1/completions", content=big, headers=TEXT, timeout=60), 413)["code"] == "request_too_large"
    parts = (big[at : at + 2**16] for at in range(0, len(big), 2**16))
    refusal(httpx.post(f"{shared.url}/v1/completions", content=parts, headers=TEXT, timeout=60), 413)
    nearly = json.dumps({"prompt": [5] * 300_000}).encode()
    error = refusal(httpx.post(f"{shared.url}/v1/completions", content=nearly, headers=TEXT), 400)
    assert "'prompt' has 300000 tokens; the context has 512" in error["message"]


def test_two_requests_of_one_id_are_refused_while_the_first_is_under_way(shared: Server) -> None:
    body = {"prompt": "x", "request_id": "twice"}
    shared.control("/pause?mode=recompute")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(shared.post, "/v1/completions", body)
        until(lambda: shared.metric("vllm:num_requests_waiting") == 1, "the first to be held")
        assert refusal(shared.post("/v1/completions", body), 400)["param"] == "request_id"
        shared.control("/resume")
        assert first.result().status_code == 200
    assert shared.complete(**body)["id"] == "cmpl-twice"


@pytest.mark.parametrize("request_bytes", [b"GET", b"\x00\x01\x02\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"A" * 200_000])
def test_bytes_that_are_no_http_end_the_connection_alone(shared: Server, request_bytes: bytes) -> None:
    host, port = shared.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        answer = b""
        # The server may have closed the connection already.
        with contextlib.suppress(OSError):
            connection.sendall(request_bytes)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


@pytest.mark.full
def test_keys_queue_and_half_open_connections(model: Path, tmp_path: Path) -> None:
    arguments = ("--api-key", "open", "--max-waiting", "1", "--max-num-seqs", "1", "--request-timeout", "1")
    with server(model, tmp_path, *arguments) as running:
        right = {"Authorization": "Bearer open"}
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        for wrong in ({}, {"Authorization": "Bearer shut"}, {"Authorization": "open"}, CONTROL):
            for path in ("/v1/completions", "/generate", "/tokenize", "/v1/chat/completions"):
                assert refusal(running.post(path, body, headers=wrong), 401)["code"] == "invalid_api_key"
        refusal(running.get("/v1/models"), 401)
        for path in ("/health", "/readiness", "/liveness", "/startup", "/metrics", "/version"):
            assert running.get(path).status_code == 200
        refusal(running.post("/pause", headers=right), 401)
        running.control("/pause?mode=recompute")
        with ThreadPoolExecutor() as threads:
            held = [threads.submit(running.post, "/v1/completions", body, headers=right) for _ in range(2)]
            until(lambda: running.metric("vllm:num_requests_waiting") == 2, "a full queue")
            full = running.post("/v1/completions", {"prompt": "x"}, headers=right)
            assert refusal(full, 429)["code"] == "queue_full" and int(full.headers["retry-after"]) >= 1
            running.control("/resume")
            assert all(one.result().text.endswith("data: [DONE]\n\n") for one in held)
        refusal(running.post("/v1/completions", {"prompt": ["x"] * 5}, headers=right), 429)
        running.wait_idle()
        files = running.files()
        host, port = running.url.removeprefix("http://").split(":")
        for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHos", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /heal"):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(sent)
                while connection.recv(65536):
                    pass
        slow = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer open\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(slow)
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")
        until(lambda: running.files() <= files, "the connections to be closed")
