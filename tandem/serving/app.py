"""The HTTP application: every route, and the shape of every error."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import tandem
from tandem.config.traces import REQUEST_RATIO
from tandem.serving.engines.instance import InstanceDied
from tandem.serving.errors import ApiError, error_body, internal, invalid, unavailable
from tandem.serving.guard import Guard
from tandem.serving.ignored_fields import WARNING, warned
from tandem.serving.log_lines import RequestLog
from tandem.serving.parsed_route import ParsedRoute
from tandem.serving.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest
from tandem.serving.root_path import RootPath, serve_docs
from tandem.serving.routes import adapters, anthropic, control, generate, invocations, kv_cache, openai, pooling, probes, responses
from tandem.serving.sessions import ClientLeft
from tandem.serving.state import ServerState
from tandem.serving.traced import RequestTraces
from tandem.serving.weight_versions import HEADER as WEIGHT_VERSION

logger = logging.getLogger(__name__)

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    400: "The request is not valid.", 401: "A key is missing or wrong.", 404: "There is no such model.", 408: "The request came too slowly.",
    413: "The request is too large.", 422: "Not used.", 429: "The queue is full.", 500: "The engine failed.", 503: "Loading, draining or asleep.",
}  # fmt: skip
_ANTHROPIC_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": {"type": "string"}, "message": {"type": "string"}}},
    },
}


def _errors(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": text, "content": {"application/json": {"schema": schema}}} for status, text in _STATUSES.items()}


def make_app(state: ServerState) -> FastAPI:
    """The application of one server."""
    settings = state.settings
    app = FastAPI(
        title="Tandem", version=tandem.__version__, responses=_errors(_ERROR_SCHEMA), docs_url=None, redoc_url=None,
        # Starlette knows no prefix to which it could send a client.
        servers=[{"url": settings.root_path}] if settings.root_path else None, redirect_slashes=not settings.root_path,
    )  # fmt: skip
    serve_docs(app, settings.root_path)
    app.router.route_class = ParsedRoute
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(InstanceDied, _died)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientLeft, _client_left)
    app.add_exception_handler(Exception, _defect)
    _inference(app, state)
    app.include_router(pooling.router(state))
    app.include_router(invocations.router(state))
    app.include_router(control.router(state))
    app.include_router(adapters.router(state.adapters))
    app.include_router(probes.router(state))
    app.include_router(kv_cache.router(state))
    app.add_middleware(Guard, state=state)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=settings.allowed_methods, allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials, expose_headers=[WARNING, WEIGHT_VERSION],
        )  # fmt: skip
    if settings.log_requests:
        app.add_middleware(RequestLog, lines=state.lines)
    if settings.traces is not None:
        app.add_middleware(RequestTraces, ratio=settings.traces.ratio(REQUEST_RATIO))
    if settings.root_path:
        app.add_middleware(RootPath, prefix=settings.root_path)
    return app


def _inference(app: FastAPI, state: ServerState) -> None:
    streamed: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}

    @app.post("/v1/completions", responses=streamed, response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return warned(body, await openai.completions(state, body, request))

    @app.post("/v1/chat/completions", responses=streamed, response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer in a conversation."""
        return warned(body, await openai.chat_completions(state, body, request), request)

    @app.post("/v1/responses", responses=streamed, response_model=None)
    async def respond(body: responses.ResponsesRequest, request: Request) -> Response:
        """Answer in a conversation, in the form of OpenAI's responses."""
        return warned(body, await responses.create(state, body, request), request)

    @app.get("/v1/responses/{id}", response_model=None)
    async def stored_response(id: str) -> dict[str, Any]:
        return responses.retrieve(state, id)

    @app.delete("/v1/responses/{id}", response_model=None)
    async def deleted_response(id: str) -> dict[str, Any]:
        return responses.delete(state, id)

    @app.post("/v1/messages", responses=streamed | _errors(_ANTHROPIC_ERROR_SCHEMA), response_model=None)
    async def messages(body: anthropic.MessagesRequest, request: Request) -> Response:
        """Answer in a conversation, in the form of Anthropic's messages."""
        return warned(body, await anthropic.create(state, body, request), request)

    @app.post("/v1/messages/count_tokens", responses=_errors(_ANTHROPIC_ERROR_SCHEMA), response_model=None)
    async def count_tokens(body: anthropic.MessagesRequest, request: Request) -> dict[str, Any]:
        """The number of tokens of the prompt that a request has."""
        return await anthropic.count_tokens(state, body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that are served."""
        return {"object": "list", "data": [_model(state, name) for name in (*state.settings.names, *state.adapters.names)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        state.check_model(name)
        return _model(state, name)

    @app.post("/generate", responses=streamed, response_model=None)
    async def generate_tokens(body: GenerateRequest, request: Request) -> Response:
        """Tokens in, tokens out."""
        return warned(body, await generate.generate(state, body, request))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        return await generate.tokenize(state, body, request)

    @app.api_route("/v1/audio/{rest:path}", methods=["GET", "POST"], include_in_schema=False, response_model=None)
    @app.api_route("/v1/images/{rest:path}", methods=["GET", "POST"], include_in_schema=False, response_model=None)
    async def other_media(rest: str, request: Request) -> Response:
        raise ApiError(404, f"there is no {request.url.path[:100]}: the models read and write text alone", code="not_supported")

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """The settings of the tokenizer."""
        return await generate.tokenizer_info(state)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        return await generate.detokenize(state, body)


def _model(state: ServerState, name: str) -> dict[str, Any]:
    adapter = state.adapters.get(name)
    return {
        "id": name, "object": "model", "created": state.created, "owned_by": "tandem",
        "root": state.settings.engine.model if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else state.model_name, "max_model_len": state.max_model_len,
        "weight_version": list(state.pool.weights.version),
    }  # fmt: skip


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error_body(error, request.url.path), error.status, headers=error.headers)


async def _died(request: Request, error: Exception) -> Response:
    return await _api_error(request, unavailable(str(error), retry_after_s=5))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return await _api_error(request, invalid(f"the body is not JSON: {first.get('ctx', {}).get('error', '')}"))
    if not where:
        return await _api_error(request, invalid("the body is not a JSON object; send one with 'Content-Type: application/json'"))
    return await _api_error(request, invalid(f"'{'.'.join(where)}': {first['msg']}", where[0]))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, str(error.detail))
    headers = dict(error.headers or {})
    if error.status_code == 405:
        # Starlette knows the methods of the first route alone.
        routes = [route for route in request.app.routes if isinstance(route, Route) and route.path_regex.match(request.url.path)]
        headers["Allow"] = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
    return JSONResponse(error_body(answer, request.url.path), answer.status, headers=headers)


async def _client_left(request: Request, error: Exception) -> Response:
    # The client has left; proxies log the status.
    return Response(status_code=499)


async def _defect(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return await _api_error(request, internal(f"the server failed: {type(error).__name__}"))
