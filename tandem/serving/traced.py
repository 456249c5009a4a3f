"""ASGI middleware that makes a span of each request, of a server or a gateway, in the trace that its client has begun or in a new one."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.runtime.traces.context import HEADER, enter, leave, new_trace, parse_traceparent
from tandem.runtime.traces.spans import OpenSpan, begin, begin_first
from tandem.serving.log_lines import QUIET

TRACE = "tandem.trace"
"""The key of a request's scope under which its open span is, if its trace is sampled."""
OPERATIONS = {
    "/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat", "/v1/messages": "chat", "/v1/embeddings": "embeddings",
    "/generate": "text_completion",
}  # fmt: skip
"""OpenTelemetry's names of what is asked for (https://opentelemetry.io/docs/specs/semconv/gen-ai/)."""
_HEADER = HEADER.encode()
_UNTRACED = frozenset((*QUIET, "/kv_cache", "/openapi.json", "/docs"))


class RequestTraces:
    """``ratio``: the share of the traces that begin here which are sampled; a client with a ``traceparent`` has decided for itself."""

    def __init__(self, app: ASGIApp, ratio: float) -> None:
        self._app, self._ratio = app, ratio

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNTRACED:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        parent = parse_traceparent(given.decode("latin-1")) if given else None
        context = parent or new_trace(self._ratio)
        if not context.sampled:
            # What is called for it learns so, and samples no trace of its own.
            token = enter(context)
            try:
                await self._app(scope, receive, send)
            finally:
                leave(token)
            return
        path, method = scope["path"], scope["method"]
        attributes = {"http.request.method": method, "url.path": path[:200]}
        if path in OPERATIONS:
            attributes["gen_ai.operation.name"] = OPERATIONS[path]
        name = f"{method} {path}" if path in OPERATIONS else method
        opened = begin(name, context, attributes, "server") if parent else begin_first(name, context, attributes, "server")
        assert opened is not None, "its trace is sampled"
        scope[TRACE] = opened
        with opened:
            await self._app(scope, receive, _noted(opened, send))


def _noted(opened: OpenSpan, send: Send) -> Send:
    async def noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            status = message["status"]
            opened.update({"http.response.status_code": status})
            if status >= 500:
                opened.error = f"status {status}"
        await send(message)

    return noted
