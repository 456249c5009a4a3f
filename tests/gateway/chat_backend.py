"""A server of OpenAI's chats in a thread of the test, which answers what the test says."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class ChatBackend:
    """``pieces``: the texts of the next answer, a piece an event. ``logprobs``: those of each piece, where the request asks for them. ``stalls``: it sends the
    pieces and then nothing. ``versions``: of its weights, for which it is Tandem's server. ``has_template``: it takes chats."""

    name: str = "chat"
    models: tuple[str, ...] = ("m",)
    version: list[int] | None = None
    pieces: list[str] = field(default_factory=lambda: ["Hello", " there"])
    logprobs: list[dict[str, Any]] | None = None
    stalls: bool = False
    has_template: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: int = 0
    """Clients that left before the end."""
    url: str = ""

    def reset(self) -> None:
        """Answers as at first, and forgets what it was asked."""
        self.pieces, self.logprobs, self.stalls, self.has_template = ["Hello", " there"], None, False, True
        self.asked.clear()
        self.keys.clear()

    async def list(self, _: web.Request) -> web.Response:
        owner = {"owned_by": "tests"} if self.version is None else {"owned_by": "tandem", "weight_version": self.version}
        return web.json_response({"object": "list", "data": [{"id": model, "object": "model", **owner} for model in self.models]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append({"path": request.path, **body})
        self.keys.append(request.headers.get("Authorization"))
        is_chat = request.path.startswith("/v1/chat")
        if is_chat and not self.has_template:
            return web.json_response({"error": {"message": "'m' has no chat template; use /v1/completions", "type": "invalid_request_error"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number, piece in enumerate(self.pieces):
                choice: dict[str, Any] = {"index": 0, "finish_reason": None, **({"delta": {"content": piece}} if is_chat else {"text": piece})}
                if self.logprobs and body.get("logprobs"):
                    choice["logprobs"] = {"content": [self.logprobs[number]]}
                await self.event(response, {"choices": [choice], "weight_versions": [self.version] if self.version else []})
            while self.stalls:
                # aiohttp cancels this when the client leaves.
                await asyncio.sleep(0.02)
            usage = {"prompt_tokens": 5, "completion_tokens": len(self.pieces), "total_tokens": 5 + len(self.pieces)}
            await self.event(response, {"choices": [{"index": 0, "finish_reason": "stop", **({"delta": {}} if is_chat else {"text": ""})}]})
            await self.event(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        return response

    async def event(self, response: web.StreamResponse, content: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(content)}\n\n".encode())


@contextlib.contextmanager
def chat_backend(backend: ChatBackend) -> Iterator[ChatBackend]:
    """Runs ``backend`` and sets its ``url``."""
    app = web.Application(client_max_size=2**26)
    app.add_routes([web.get("/v1/models", backend.list), web.get("/readiness", backend.list)])
    app.add_routes([web.post(path, backend.answer) for path in ("/v1/chat/completions", "/v1/completions")])
    with running_app(app) as backend.url:
        yield backend


@contextlib.contextmanager
def running_app(app: web.Application) -> Iterator[str]:
    """Serves ``app`` in a thread; gives its URL."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> str:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    # Not in this thread, where Playwright has a loop of its own.
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
