"""``POST /invocations``, the one path that Amazon SageMaker calls: a body is answered as at the path whose requests have its fields."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from tandem.serving.errors import invalid
from tandem.serving.ignored_fields import warned
from tandem.serving.parsed_route import ParsedRoute
from tandem.serving.pooling_protocol import ClassifyRequest, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from tandem.serving.protocol import Body, ChatCompletionRequest, CompletionRequest
from tandem.serving.routes import openai, pooling
from tandem.serving.state import ServerState

ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
"""The header in which SageMaker names an adapter; it replaces the field ``model``."""
_SCORED = ("text_1", "queries", "items", "data_1")


def router(state: ServerState) -> APIRouter:
    """The route."""
    routes = APIRouter(route_class=ParsedRoute)

    @routes.post("/invocations", response_model=None)
    async def invocations(body: dict[str, Any], request: Request) -> Response:
        """Answer as the path does whose requests have the fields of the body: ``messages``, ``prompt``, ``input``, ``text_1``, ``query``."""
        kind, answer = _kind(state, body)
        adapter = request.headers.get(ADAPTER)
        try:
            asked = kind.model_validate(body if adapter is None else {**body, "model": adapter})
        except ValidationError as error:
            raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None
        return warned(asked, await answer(state, asked, request))

    return routes


def _kind(state: ServerState, body: dict[str, Any]) -> tuple[type[Body], Callable[[ServerState, Any, Request], Awaitable[Response]]]:
    """Returns the class of a request with the fields of ``body``, and what answers it. Raises ``ApiError``."""
    if "query" in body:
        return RerankRequest, pooling.rerank
    if any(name in body for name in _SCORED):
        return ScoreRequest, pooling.score
    if "prompt" in body:
        return CompletionRequest, openai.completions
    if "messages" in body and state.pooling is None:
        return ChatCompletionRequest, openai.chat_completions
    if "messages" in body or "input" in body:
        if "task" in body:
            return PoolingRequest, pooling.pooling
        scores = state.pooling is not None and state.pooling.scored_by is not None
        return (ClassifyRequest, pooling.classify) if scores else (EmbeddingRequest, pooling.embeddings)
    raise invalid("the body has none of 'messages', 'prompt', 'input', 'text_1' and 'query', which say what is asked for; send one of them")
