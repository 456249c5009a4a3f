"""The gateway's own errors: in the form that the client reads, with the id of the request, and without a time to wait where waiting cannot help."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from aiohttp import web
from chat_backend import running_app
from gateway_process import FaultBackend, Gateway, fault_backend, gateway
from http_processes import until

from tandem.gateway.keys import new_key, write_keys

CHAT: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def backend() -> Iterator[FaultBackend]:
    with fault_backend("only") as running:
        yield running


def anthropic_form(answer: httpx.Response, status: int, kind: str) -> str:
    """Returns the message of an error of Anthropic's form with the id of its request."""
    body = answer.json()
    assert (answer.status_code, body["type"], set(body["error"]), body["error"]["type"]) == (status, "error", {"type", "message"}, kind), answer.text
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return str(body["error"]["message"])


def test_errors_on_messages_have_the_form_and_the_id_of_anthropics_api(backend: FaultBackend, tmp_path: Path) -> None:
    key, record = new_key("main")
    write_keys(tmp_path / "keys.json", {record.id: record})
    limits = {"main": {"limits": {"tokens_per_minute": 400}}}
    with gateway(tmp_path, [backend], keys_file=str(tmp_path / "keys.json"), tenants=limits) as running:
        running.client.headers["x-api-key"] = key
        running.wait_ready(backend)
        refused = running.post("/v1/messages", CHAT, headers={"x-api-key": "wrong", "x-request-id": "mine"})
        assert anthropic_form(refused, 401, "authentication_error") and refused.json()["request_id"] == "mine"
        assert "'other' is not served" in anthropic_form(running.post("/v1/messages", {**CHAT, "model": "other"}), 404, "not_found_error")
        anthropic_form(running.post("/v1/messages/count_tokens", {**CHAT, "stream": "x"}), 400, "invalid_request_error")
        anthropic_form(running.client.post(f"{running.url}/v1/messages", content=b"{"), 400, "invalid_request_error")
        never = running.post("/v1/messages", {**CHAT, "max_tokens": 1000})
        assert "more than the limit" in anthropic_form(never, 429, "rate_limit_error")
        assert "retry-after" not in never.headers and never.headers["x-should-retry"] == "false"
        assert running.post("/v1/messages", CHAT).headers["request-id"]

        # The real clients read them, and do not repeat what can never fit.
        limited = running.metric("limited_total")
        with pytest.raises(anthropic.RateLimitError) as error:
            anthropic.Anthropic(base_url=running.url, api_key=key).messages.create(**{**CHAT, "max_tokens": 1000})
        assert error.value.request_id and error.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
        with pytest.raises(openai.RateLimitError):
            openai.OpenAI(base_url=f"{running.url}/v1", api_key=key).chat.completions.create(**{**CHAT, "max_tokens": 1000})
        assert running.metric("limited_total") == limited + 2
        with pytest.raises(anthropic.NotFoundError) as absent:
            anthropic.Anthropic(base_url=running.url, api_key=key).messages.create(**{**CHAT, "model": "other"})
        assert absent.value.request_id == absent.value.response.headers["request-id"]

        # Others have OpenAI's form.
        plain = running.post("/v1/chat/completions", {**CHAT, "model": "other"})
        assert set(plain.json()) == {"error"} and plain.headers["x-request-id"] and "request-id" not in plain.headers


def test_a_stream_of_messages_that_breaks_ends_with_anthropics_error(backend: FaultBackend, tmp_path: Path) -> None:
    with gateway(tmp_path, [backend]) as running:
        running.wait_ready(backend)
        backend.mode("cut")
        answer = running.post("/v1/messages", {**CHAT, "stream": True, "max_tokens": 20}, headers={"x-request-id": "mine"})
        backend.mode("ok")
        name, data = answer.text.rstrip().split("\n\n")[-1].split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == "event: error" and (event["type"], event["error"]["type"], event["request_id"]) == ("error", "api_error", "mine")
        assert "broke off" in event["error"]["message"] and answer.headers["request-id"] == "mine"


def long_contexts(lengths: list[int | None], asked: list[Any]) -> web.Application:
    """Returns a server of the models ``m0``, ``m1`` and so on with contexts of these lengths."""

    async def models(_: web.Request) -> web.Response:
        listed = [{"id": f"m{i}", "object": "model"} | ({} if length is None else {"max_model_len": length}) for i, length in enumerate(lengths)]
        return web.json_response({"object": "list", "data": listed})

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/readiness", models), web.post("/v1/completions", complete)])
    return app


def test_a_prompt_longer_than_every_context_is_refused_for_good(tmp_path: Path) -> None:
    asked: list[Any] = []

    def ask(running: Gateway, model: str, prompt: Any, **more: Any) -> httpx.Response:
        return running.post("/v1/completions", {"model": model, "prompt": prompt, **more})

    with running_app(long_contexts([100, 1000, None], asked)) as url, gateway(tmp_path, (), backends=[url]) as running:
        until(lambda: running.metric("backend_ready") == 1, "the server")
        for prompt in ([1] * 101, [[1], [1] * 101]):
            refused = ask(running, "m0", prompt)
            assert refused.status_code == 400 and "retry-after" not in refused.headers
            assert refused.json()["error"]["message"] == "the prompt has 101 tokens; the longest context of the backends of this model has 100"
        assert not asked
        # What the gateway cannot know is for the backend.
        for model, prompt in (("m0", [1] * 100), ("m1", [1] * 101), ("m2", [1] * 101), ("m0", "x" * 9999)):
            assert ask(running, model, prompt).status_code == 200
        assert ask(running, "m0", [1] * 101, truncate_prompt_tokens=9).status_code == 200 and len(asked) == 5
