"""The HTTP server inside of a rollout worker that answers the requests of agents. A key names the process that runs an agent, and so its present episode."""

import asyncio
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tandem.rl.agents.check_agent import check_packages
from tandem.rl.agents.model_calls import ModelCall
from tandem.rl.agents.session import Asked, Session, SessionEnded, TooLong
from tandem.serving.errors import ApiError, ClientLeft, error_body, invalid, unauthorised
from tandem.types import UserError

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

MODEL = "tandem"
"""The name of the model in answers to requests that name none; every name is the model that is trained."""

_START_S = 30.0
_LOG_LEVEL = "warning"


class AgentServer:
    """Serves at ``url`` in a thread of its own. ``submit`` is called with each request that the model is to answer."""

    def __init__(self, submit: Callable[[Asked], None]) -> None:
        """Raises ``UserError`` without the packages of the server."""
        check_packages()
        import fastapi
        import uvicorn

        self._submit = submit
        self._sessions: dict[str, Session] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        app = fastapi.FastAPI(openapi_url=None)
        self._add_routes(app)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level=_LOG_LEVEL, lifespan="off", access_log=False, timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, name="agents", daemon=True)
        self._thread.start()

    def bind(self, key: str, session: Session) -> None:
        """Gives the requests with ``key`` to ``session``."""
        self._sessions[key] = session

    def unbind(self, key: str) -> None:
        """Ends the session of ``key``: its requests are refused."""
        session = self._sessions.pop(key, None)
        if session is not None:
            session.close()

    def close(self) -> None:
        """Ends the server."""
        self._server.should_exit = True
        self._thread.join(_START_S)
        self._socket.close()

    def _session(self, request: "Request") -> Session:
        key = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        session = self._sessions.get(key)
        if session is None:
            raise unauthorised("this key names no episode that runs; use the one of the environment, OPENAI_API_KEY or ANTHROPIC_API_KEY")
        return session

    async def _answer(self, request: "Request", ask: Callable[[Session], Asked]) -> ModelCall:
        """Returns the call that answers ``request``. Raises ``ApiError``, and ``ClientLeft``."""
        try:
            asked = ask(self._session(request))
            self._submit(asked)
            try:
                completion = await asyncio.wrap_future(asked.completion)
            except UserError:
                asked.session.forget(asked)
                raise
            if await request.is_disconnected():
                asked.session.forget(asked)
                raise ClientLeft
            return asked.session.record(asked, completion)
        except TooLong as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from None
        except UserError as error:
            raise invalid(str(error)) from None
        except SessionEnded:
            raise unauthorised("the episode of this key has ended") from None

    def _add_routes(self, app: "FastAPI") -> None:
        from fastapi import Request
        from fastapi.exceptions import RequestValidationError
        from starlette.responses import JSONResponse, Response, StreamingResponse

        from tandem.rl.agents.anthropic_messages import AgentMessagesRequest
        from tandem.rl.agents.chat_completions import AgentChatRequest, chat_chunks, chat_completion
        from tandem.rl.agents.completions import AgentCompletionRequest, completion, completion_chunks
        from tandem.rl.agents.responses import AgentResponsesRequest
        from tandem.rl.agents.whole_answers import answer_events, whole_answer
        from tandem.serving.forms.anthropic import MessageWriter
        from tandem.serving.forms.responses import ResponseWriter

        def refused(request: Request, error: Exception) -> Response:
            assert isinstance(error, ApiError)
            return JSONResponse(error_body(error, request.url.path), error.status)

        def malformed(request: Request, error: Exception) -> Response:
            assert isinstance(error, RequestValidationError)
            first = error.errors()[0]
            return refused(request, invalid(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"))

        app.add_exception_handler(ApiError, refused)
        app.add_exception_handler(RequestValidationError, malformed)
        app.add_exception_handler(ClientLeft, lambda request, error: Response(status_code=499))

        def stream(events: Iterable[Mapping[str, Any]], *, named: bool = False) -> Response:
            return StreamingResponse(_event_lines(events, named), media_type="text/event-stream")

        async def answered(
            body: AgentChatRequest | AgentCompletionRequest, request: Request, kind: str, whole: Callable[..., Mapping[str, Any]],
            chunks: Callable[..., Iterable[Mapping[str, Any]]],
        ) -> Response:
            """Returns the answer in OpenAI's form: ``whole``, or as ``chunks``, with an id that begins with ``kind``."""
            body.check()
            call = await self._answer(request, body.ask)
            about = (f"{kind}-{uuid.uuid4().hex}", body.model or MODEL, int(time.time()))
            if not body.stream:
                return JSONResponse(whole(call, *about))
            return stream(chunks(call, *about, bool(body.stream_options and body.stream_options.include_usage)))

        @app.post("/v1/chat/completions", response_model=None)
        async def chat_completions(body: AgentChatRequest, request: Request) -> Response:
            return await answered(body, request, "chatcmpl", chat_completion, chat_chunks)

        @app.post("/v1/completions", response_model=None)
        async def completions(body: AgentCompletionRequest, request: Request) -> Response:
            return await answered(body, request, "cmpl", completion, completion_chunks)

        @app.post("/v1/responses", response_model=None)
        async def respond(body: AgentResponsesRequest, request: Request) -> Response:
            body.check()
            session, id = self._session(request), f"resp_{uuid.uuid4().hex}"
            call = await self._answer(request, body.ask)
            session.name_response(id, body.conversation(call))
            writer = ResponseWriter(id, body.model or MODEL, int(time.time()))
            return stream(answer_events(call, writer), named=True) if body.stream else JSONResponse(whole_answer(call, writer))

        @app.post("/v1/messages", response_model=None)
        async def messages(body: AgentMessagesRequest, request: Request) -> Response:
            body.check()
            if body.max_tokens is None:
                raise invalid("'max_tokens' is missing", "max_tokens")
            call = await self._answer(request, body.ask)
            writer = MessageWriter(f"msg_{uuid.uuid4().hex}", body.model or MODEL)
            return stream(answer_events(call, writer), named=True) if body.stream else JSONResponse(whole_answer(call, writer))

        @app.post("/v1/messages/count_tokens", response_model=None)
        async def count_tokens(body: AgentMessagesRequest, request: Request) -> Response:
            body.check()
            try:
                return JSONResponse({"input_tokens": self._session(request).count(*body.chat())})
            except UserError as error:
                raise invalid(str(error), "messages") from None

        @app.get("/v1/models", response_model=None)
        async def models() -> Response:
            return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}]})


def _event_lines(events: Iterable[Mapping[str, Any]], named: bool) -> Iterator[str]:
    """Yields the lines of a stream of server-sent events, each ``named`` by its type; one without names has an end of its own."""
    for event in events:
        name = f"event: {event['type']}\n" if named else ""
        yield f"{name}data: {json.dumps(event, ensure_ascii=False)}\n\n"
    if not named:
        yield "data: [DONE]\n\n"
