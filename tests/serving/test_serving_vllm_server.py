"""What operators of vLLM's server set: a certificate, a prefix of the paths, the log of HTTP, how many log-probabilities there are and how they name tokens,
the role of answers, ``/tokenizer_info``, and the path of SageMaker."""

import json
import math
import shutil
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from certificates import certificate
from cryptography import x509
from http_processes import until
from server_process import Server, server
from tiny_model import TEMPLATE, VOCABULARY

from tandem.cli.main import main

KEY = {"Authorization": "Bearer secret"}


def context(folder: Path, client: str | None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=folder / "authority.crt")
    made.check_hostname = False
    if client is not None:
        made.load_cert_chain(folder / f"{client}.crt", folder / f"{client}.key")
    return made


def connection(running: Server, client: ssl.SSLContext) -> ssl.SSLSocket:
    url = httpx.URL(running.url)
    return client.wrap_socket(socket.create_connection((url.host, url.port), 60))


def serial(running: Server, client: ssl.SSLContext) -> int:
    """Returns the serial number of the certificate that the server shows."""
    with connection(running, client) as made:
        shown = made.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


@pytest.mark.full
def test_a_server_behind_https_and_a_prefix_is_that_of_vllm(model: Path, tmp_path: Path) -> None:
    authority = certificate(tmp_path, "authority")
    first, _ = certificate(tmp_path, "server", authority)
    certificate(tmp_path, "client", authority)
    certificate(tmp_path, "stranger")
    flags = (
        "--ssl-certfile", str(tmp_path / "server.crt"), "--ssl-keyfile", str(tmp_path / "server.key"), "--ssl-ca-certs", str(tmp_path / "authority.crt"),
        "--ssl-cert-reqs", "2", "--enable-ssl-refresh", "--root-path", "/models/tiny", "--max-logprobs", "-1", "--response-role", "model",
        "--return-tokens-as-token-ids", "--uvicorn-log-level", "warning", "--enable-tokenizer-info-endpoint", "--api-key", "secret",
    )  # fmt: skip
    good = context(tmp_path, "client")
    with server(model, tmp_path, *flags, tls=good) as running:
        assert running.url.startswith("https://") and running.url.endswith("/models/tiny")
        for name in (None, "stranger"):
            with httpx.Client(verify=context(tmp_path, name), timeout=60) as client, pytest.raises(httpx.TransportError):
                client.get(f"{running.url}/liveness")
        with pytest.raises(httpx.TransportError):
            running.client.get(running.url.replace("https", "http") + "/liveness")

        # With the prefix and without it, which the proxy may have removed; the keys of calls do not depend on it.
        bare = running.url.removesuffix("/models/tiny")
        for base in (running.url, bare):
            assert running.client.get(f"{base}/v1/models").status_code == 401 == running.client.post(f"{base}/pause", headers=KEY).status_code
            assert running.client.get(f"{base}/v1/models", headers=KEY).json()["data"][0]["id"] == str(model)
            assert running.client.get(f"{base}/models/tiny/v1/models", headers=KEY).status_code == (404 if base == running.url else 200)
            assert running.client.post(f"{base}/v1/messages", headers=KEY, json={"max_tokens": "x"}).json()["type"] == "error"
        assert running.get("/openapi.json").json()["servers"] == [{"url": "/models/tiny"}]
        assert "/models/tiny/openapi.json" in running.get("/docs").text
        assert running.get("/v1/models/", headers=KEY).status_code == 404

        _answers(running)
        shown = running.get("/tokenizer_info", headers=KEY).json()
        assert (shown["tokenizer_class"], shown["eos_token"], shown["chat_template"]) == ("PreTrainedTokenizerFast", "<eos>", TEMPLATE)

        with connection(running, good) as raw:
            raw.sendall(b"\x00\x01 not HTTP\r\n\r\n")
            assert raw.recv(64).startswith(b"HTTP/1.1 400")
        until(lambda: "tandem: warning: Invalid HTTP request received." in running.log.read_text(), "the line on the request")
        assert "GET /" not in running.log.read_text() and "POST /" not in running.log.read_text()

        shutil.copy(tmp_path / "stranger.key", tmp_path / "server.key")
        until(lambda: "the certificate stays as it was: the key" in running.log.read_text(), "the line on the key")
        assert serial(running, good) == first.serial_number
        second, _ = certificate(tmp_path, "server", authority)
        until(lambda: serial(running, good) == second.serial_number, "the new certificate")
        assert running.stop() == 0 and "Traceback" not in running.log.read_text()


def _answers(running: Server) -> None:
    """Checks roles, and log-probabilities of the whole vocabulary with ids for tokens."""
    ask = {"max_tokens": 3, "temperature": 0, "return_token_ids": True}
    response = running.post("/v1/completions", {**ask, "prompt": "the fox", "logprobs": -1, "echo": True}, headers=KEY)
    choice = response.json()["choices"][0]
    names = [f"token_id:{token}" for token in choice["prompt_token_ids"] + choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    for row in choice["logprobs"]["top_logprobs"][1:]:
        assert set(row) == {f"token_id:{token}" for token in range(VOCABULARY)} and math.isclose(sum(map(math.exp, row.values())), 1, abs_tol=1e-4)
    texts = running.post("/v1/completions", {**ask, "prompt": "the fox", "logprobs": 0, "return_tokens_as_token_ids": False}, headers=KEY)
    assert "".join(texts.json()["choices"][0]["logprobs"]["tokens"]) == texts.json()["choices"][0]["text"]
    assert choice["logprobs"]["text_offset"][-1] + len(texts.json()["choices"][0]["logprobs"]["tokens"][-1]) == len(choice["text"])

    messages = [{"role": "user", "content": "hi"}]
    asked = {**ask, "messages": messages, "logprobs": True, "top_logprobs": 25}
    whole = running.post("/v1/chat/completions", asked, headers=KEY).json()["choices"][0]
    assert whole["message"]["role"] == "model"
    entries = whole["logprobs"]["content"]
    assert [each["token"] for each in entries] == [f"token_id:{token}" for token in whole["token_ids"]] and len(entries[0]["top_logprobs"]) == 25
    assert bytes(byte for each in entries for byte in each["bytes"]).decode() == whole["message"]["content"]
    stream = running.post("/v1/chat/completions", {**asked, "stream": True, "add_generation_prompt": False}, headers=KEY).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert chunks[0]["choices"][0]["delta"]["role"] == "user"
    assert all(each["token"].startswith("token_id:") for chunk in chunks[1:] for each in chunk["choices"][0]["logprobs"]["content"])
    prompt = running.post("/v1/chat/completions", {**ask, "messages": messages, "prompt_logprobs": -1}, headers=KEY).json()["choices"][0]["prompt_logprobs"]
    assert len(prompt[-1]) == VOCABULARY


def test_more_log_probabilities_than_the_server_returns_are_refused(shared: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for count in (21, -1):
        for path, body, name in (
            ("/v1/completions", {"prompt": "a", "logprobs": count}, "logprobs"),
            ("/v1/completions", {"prompt": "a", "prompt_logprobs": count}, "prompt_logprobs"),
            ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": count}, "top_logprobs"),
            ("/v1/responses", {"input": "hi", "prompt_logprobs": count}, "prompt_logprobs"),
            ("/generate", {"prompt": "a", "sampling_params": {"logprobs": count}}, "logprobs"),
        ):  # fmt: skip
            answer = shared.post(path, body)
            message = f"'{name}' is {count}; this server returns the log-probabilities of at most 20 tokens (--max-logprobs)"
            assert (answer.status_code, answer.json()["error"]["message"], answer.json()["error"]["param"]) == (400, message, name)
    refusal = shared.get("/tokenizer_info")
    assert refusal.status_code == 404 and "--enable-tokenizer-info-endpoint" in refusal.json()["error"]["message"]


def test_invocations_answer_as_the_path_whose_fields_they_have(shared: Server) -> None:
    def same(path: str, body: dict[str, object]) -> None:
        found, wanted = (shared.post(each, {**body, "seed": 1, "max_tokens": 4}).json() for each in ("/invocations", path))
        assert found["choices"] == wanted["choices"] and found["object"] == wanted["object"]

    same("/v1/completions", {"prompt": "the fox"})
    same("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True})
    streamed = shared.post("/invocations", {"prompt": "the fox", "stream": True}).text
    assert streamed.endswith("data: [DONE]\n\n")
    for body, says in (
        ({}, "the body has none of 'messages', 'prompt', 'input', 'text_1' and 'query'"),
        ({"prompt": 3}, "'prompt"), ({"prompt": "a", "max_tokens": "3"}, "'max_tokens'"),
        ({"input": "a"}, "generates text and neither embeds nor scores it"),
        ({"prompt": "a", "model": "other"}, "is not served here"),
    ):  # fmt: skip
        answer = shared.post("/invocations", body)
        assert answer.status_code in (400, 404) and says in answer.json()["error"]["message"], answer.text
    adapter = shared.post("/invocations", {"prompt": "a"}, headers={"X-Amzn-SageMaker-Adapter-Identifier": "sql"})
    assert adapter.status_code == 404 and "'sql' is not served here" in adapter.json()["error"]["message"]
    assert shared.client.post(f"{shared.url}/invocations", content=b'{"prompt": "a"}').status_code == 400


@pytest.mark.parametrize(("flags", "says"), [
    (["--ssl-certfile", "a.crt"], "only one of --ssl-certfile and --ssl-keyfile is given ('a.crt'); give both"),
    (["--ssl-certfile", "a.crt", "--ssl-keyfile", "a.key"], "the file 'a.crt' (--ssl-certfile) cannot be read: No such file or directory"),
    (["--ssl-certfile", "{crt}", "--ssl-keyfile", "{other}"], "(--ssl-keyfile) is not that of the certificate"),
    (["--ssl-certfile", "{crt}", "--ssl-keyfile", "{key}", "--ssl-cert-reqs", "1"], "name the authorities with --ssl-ca-certs"),
    (["--ssl-certfile", "{crt}", "--ssl-keyfile", "{key}", "--ssl-ciphers", "x"], "no cipher of 'x' (--ssl-ciphers) is known"),
    (["--ssl-ca-certs", "a"], "--ssl-ca-certs is given without a certificate"),
    (["--enable-ssl-refresh"], "--enable-ssl-refresh is given without a certificate"),
    (["--root-path", "models"], "--root-path is 'models'; give the prefix of the paths"),
    (["--root-path", "/a/"], "--root-path is '/a/'"),
    (["--max-logprobs", "-2"], "--max-logprobs is -2; it must be at least 0, or -1"),
    (["--response-role", " "], "--response-role is ' '"),
])  # fmt: skip
def test_wrong_flags_of_the_server_are_one_line(flags: list[str], says: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate(tmp_path, "server")
    certificate(tmp_path, "other")
    files = {"{crt}": "server.crt", "{key}": "server.key", "{other}": "other.key"}
    assert main(["serve", str(model), "--port", "0", *(str(tmp_path / files[flag]) if flag in files else flag for flag in flags)]) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1, message
