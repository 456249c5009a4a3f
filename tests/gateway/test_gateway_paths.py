"""What passes the gateway beside completions and chats: stored responses, embeddings, scores, counts of tokens."""

import contextlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from chat_backend import running_app
from gateway_process import Gateway, gateway
from http_processes import until

from tandem.gateway.keys import new_key, write_keys
from tandem.gateway.usage import read_usage

USAGES: dict[str, dict[str, Any]] = {
    # As OpenAI, vLLM and Cohere's rerankers state it.
    "/v1/embeddings": {"prompt_tokens": 7, "total_tokens": 7}, "/v1/score": {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0},
    "/v1/rerank": {"total_tokens": 11}, "/pooling": {"prompt_tokens": 5, "total_tokens": 5},
}  # fmt: skip


@dataclass
class StoringBackend:
    """A server that keeps its responses, as Tandem's and vLLM's do, each its own."""

    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def create(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(request.path)
        self.headers.append(dict(request.headers))
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.kept:
            return web.json_response({"error": {"message": "not here", "code": "previous_response_not_found"}}, status=404)
        id = f"resp_{uuid.uuid4().hex}"
        self.kept[id] = {"id": id, "object": "response", "previous_response_id": previous, "usage": {"input_tokens": 3, "output_tokens": 4}}
        if not body.get("stream"):
            return web.json_response(self.kept[id])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for kind in ("response.created", "response.completed"):
            await response.write(f"event: {kind}\ndata: {json.dumps({'type': kind, 'response': self.kept[id]})}\n\n".encode())
        return response

    async def one(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path}")
        self.headers.append(dict(request.headers))
        id = request.match_info["id"]
        if id not in self.kept:
            return web.json_response({"error": {"message": "not here"}}, status=404)
        return web.json_response(self.kept[id] if request.method == "GET" else {"id": self.kept.pop(id)["id"], "deleted": True})

    async def pooled(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path == "/v1/messages/count_tokens":
            return web.json_response({"input_tokens": 1234})
        return web.json_response({"data": [{"index": 0, "embedding": [0.5]}], "usage": USAGES[request.path]})

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self.models), web.get("/readiness", self.models), web.post("/v1/responses", self.create)])
        app.add_routes([web.get("/v1/responses/{id}", self.one), web.delete("/v1/responses/{id}", self.one)])
        app.add_routes([web.post(path, self.pooled) for path in (*USAGES, "/v1/messages/count_tokens")])
        return app


@contextlib.contextmanager
def storing(folder: Path, gateways: int, **settings: Any) -> Iterator[tuple[list[StoringBackend], list[Gateway]]]:
    """Some gateways before two backends."""
    backends = [StoringBackend(), StoringBackend()]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(running_app(each.app())) for each in backends]
        listed = {"backends": [{"url": url, "name": str(number)} for number, url in enumerate(urls)]}
        made = [stack.enter_context(gateway(folder, (), **listed, **settings)) for _ in range(gateways)]
        for each in made:
            until(lambda: each.metric("backend_ready") == 2, "the backends")  # noqa: B023
        yield backends, made


def test_a_stored_response_is_found_and_continued_at_the_backend_that_has_it(tmp_path: Path) -> None:
    with storing(tmp_path, 2) as (backends, (one, two)):
        for stream in (False, True):
            for _ in range(3):
                made = one.post("/v1/responses", {"model": "m", "input": "x", "stream": stream})
                id = made.json()["id"] if not stream else json.loads(made.text.split("data: ")[1].split("\n")[0])["response"]["id"]
                before = [len(each.asked) for each in backends]
                # By this gateway, which knows where it is, and by another one, which asks.
                assert [each.get(f"/v1/responses/{id}").json()["id"] for each in (one, two)] == [id, id]
                assert sum(len(each.asked) for each in backends) - sum(before) <= 1 + 2 + 1
                for each in (one, two):
                    again = each.post("/v1/responses", {"model": "m", "input": "y", "previous_response_id": id})
                    assert again.status_code == 200 and again.json()["previous_response_id"] == id
        holder = next(each for each in backends if id in each.kept)
        assert one.client.delete(f"{one.url}/v1/responses/{id}").json()["deleted"] is True and id not in holder.kept
        for each in (one, two):
            assert each.get(f"/v1/responses/{id}").status_code == 404
        lost = one.get("/v1/responses/resp_nobody%2F..%2Fv1")
        assert lost.status_code == 404 and lost.json()["error"]["code"] == "previous_response_not_found"
        assert one.post("/v1/responses", {"model": "m", "input": "y", "previous_response_id": "resp_nobody"}).status_code == 404
        assert all(each.kept for each in backends), "both were used"


def test_embeddings_and_ranks_cost_what_they_say_and_counts_of_tokens_cost_nothing(tmp_path: Path) -> None:
    key, record = new_key("t")
    other, second = new_key("u")
    write_keys(tmp_path / "keys.json", {each.id: each for each in (record, second)})
    limits = {"t": {"limits": {"tokens_per_day": 100_000, "requests_per_day": 100}}}
    with storing(tmp_path, 1, keys_file=str(tmp_path / "keys.json"), tenants=limits) as (backends, (one,)):
        as_openai, as_anthropic = {"Authorization": f"Bearer {key}"}, {"x-api-key": key}
        used = 0
        for path, usage in USAGES.items():
            answer = one.post(path, {"model": "m", "input": ["a" * 400, "b"], "query": "q", "documents": ["d"]}, headers=as_openai)
            assert answer.status_code == 200, answer.text
            used += usage["total_tokens"]
        reserved = one.post("/v1/embeddings", {"model": "m", "input": [[1, 2, 3], [4]]}, headers=as_openai)
        assert int(reserved.headers["x-ratelimit-remaining-tokens"]) == 100_000 - used - 4
        used += 7
        counted = one.post("/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": "x" * 4000}]}, headers=as_anthropic)
        assert counted.json() == {"input_tokens": 1234} and int(counted.headers["x-ratelimit-remaining-tokens"]) == 100_000 - used
        assert int(counted.headers["x-ratelimit-remaining-requests"]) == 94

        # A response is its tenant's; neither way of sending a key reaches a backend.
        id = one.post("/v1/responses", {"model": "m", "input": "x"}, headers=as_anthropic).json()["id"]
        assert one.get(f"/v1/responses/{id}", headers=as_anthropic).status_code == 200
        assert one.get(f"/v1/responses/{id}", headers={"x-api-key": other}).status_code == 404
        assert one.get(f"/v1/responses/{id}").status_code == 401 and one.get(f"/v1/responses/{id}", headers={"x-api-key": "wrong"}).status_code == 401
        assert one.post("/v1/responses", {"model": "m", "input": "x", "previous_response_id": id}, headers={"x-api-key": other}).status_code == 404
        seen = [headers for backend in backends for headers in backend.headers]
        assert seen and not any(key in value for headers in seen for value in headers.values())


@pytest.mark.parametrize(("answer", "counts"), [
    (b'{"usage": {"prompt_tokens": 7, "total_tokens": 7}}', (7, None)),
    (b'{"usage": {"total_tokens": 11}}', (11, None)),
    (b'{"usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}', (7, 2)),
    (b'{"usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}}', (3, 4)),
    (b'{"text": "\\"total_tokens\\": 5"}', (None, None)),
])  # fmt: skip
def test_usage_is_read_as_each_kind_of_answer_states_it(answer: bytes, counts: tuple[int | None, int | None]) -> None:
    assert read_usage(answer) == counts
