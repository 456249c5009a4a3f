"""Middleware of every route: checks keys and the size and speed of bodies, and refuses requests while draining."""

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.serving.bodies import read_body
from tandem.serving.engines.block_events import CLIENT_REQUEST_ID
from tandem.serving.errors import ApiError, unauthorised, unavailable
from tandem.serving.json_body import PARSED
from tandem.serving.limits import BEFORE_LOAD_BYTES
from tandem.serving.refusal import answer
from tandem.serving.routes import adapters, control
from tandem.serving.state import ServerState

CONTROL = frozenset((*control.PATHS, *adapters.PATHS))
PUBLIC = ("/health", "/liveness", "/readiness", "/startup", "/metrics", "/version", "/ping", "/openapi.json", "/docs")

_LONGEST_ID = 128


class Guard:
    """ASGI middleware. A body is read whole before the application sees the request."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, is_inference = self._state, scope["path"] not in PUBLIC and scope["path"] not in CONTROL
        refusal: ApiError | None = None
        body: bytes | None = None
        with state.bodies.of(scope["client"][0] if scope.get("client") else "") as share:
            try:
                self._check(scope)
                limits = state.limits if state.is_started and scope["path"] not in PUBLIC else None
                limit_bytes = BEFORE_LOAD_BYTES if limits is None else limits.max_body_bytes
                body = await read_body(receive, share, limit_bytes, state.settings.request_s)
                if body is not None:
                    await state.parser.parse(scope, body, limits if is_inference else None)
            except ApiError as error:
                # The traceback would keep what was received.
                refusal = error.with_traceback(None)
            finally:
                state.memory.after(share.size)
        if refusal is not None:
            # One that came too slowly sends nothing to wait for.
            await answer(refusal, send, None if share.is_complete or refusal.status == 408 else receive, scope["path"])
            return
        if body is None:  # The client left.
            return
        # A parsed body is not needed again, and would be held until the end of the answer; FastAPI asks for its JSON if there is any.
        first: list[Message] = [{"type": "http.request", "body": b"{}" if PARSED in scope else body, "more_body": False}]
        del body

        async def replay() -> Message:
            return first.pop() if first else await receive()

        CLIENT_REQUEST_ID.set(next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")[:_LONGEST_ID])
        state.open_requests += is_inference
        try:
            await self._app(scope, replay, send)
        finally:
            state.open_requests -= is_inference
            state.memory.after(share.size)

    def _check(self, scope: Scope) -> None:
        """Raise ``ApiError`` for a request that is not answered here."""
        path, settings = scope["path"], self._state.settings
        if path in PUBLIC:
            return
        key = _bearer(scope)
        if path in CONTROL:
            if settings.control_key is None:
                raise unauthorised("control calls are refused: the server was started without a control key")
            if not _equal(key, settings.control_key):
                raise unauthorised("this call needs the control key: 'Authorization: Bearer KEY'")
            if not self._state.is_started:
                raise unavailable("the model is being loaded", retry_after_s=5)
            return
        if settings.api_keys and not sum(_equal(key, known) for known in settings.api_keys):
            raise unauthorised("a key is missing or wrong: 'Authorization: Bearer KEY'")
        if not self._state.is_started:
            raise unavailable("the model is being loaded", retry_after_s=5)
        if self._state.is_draining:
            raise unavailable("the server is shutting down", retry_after_s=10)


def _bearer(scope: Scope) -> bytes:
    """Returns the key of a request. Anthropic's clients send it as ``x-api-key``."""
    own = b""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return bytes(value[7:])
        if name == b"x-api-key":
            own = bytes(value)
    return own


def _equal(given: bytes, known: str) -> bool:
    return hmac.compare_digest(given, known.encode())
