"""Middleware of every route: checks keys and the size and speed of bodies, and refuses requests while draining."""

import asyncio
import hmac
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.serving.errors import ApiError, unauthorised, unavailable
from tandem.serving.routes import adapters, control
from tandem.serving.state import ServerState

CONTROL = frozenset((*control.PATHS, *adapters.PATHS))
PUBLIC = ("/health", "/liveness", "/readiness", "/startup", "/metrics", "/version", "/openapi.json", "/docs")


class Guard:
    """ASGI middleware. A body is read whole before the application sees the request."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            await answer(error, send)
            return
        if body is None:  # The client left.
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        if scope["path"] in PUBLIC or scope["path"] in CONTROL:
            await self._app(scope, replay, send)
            return
        self._state.open_requests += 1
        try:
            await self._app(scope, replay, send)
        finally:
            self._state.open_requests -= 1

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

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        settings = self._state.settings
        limit, parts, size = settings.max_body_bytes, [], 0
        try:
            async with asyncio.timeout(settings.request_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    if size <= limit:
                        parts.append(message.get("body", b""))
                    elif size > 8 * limit:
                        break
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(408, f"the request's body did not come within {settings.request_s:g} s") from None
        if size > limit:
            # Read to its end, within reason: a client that still writes would not see the answer.
            raise ApiError(413, f"the request's body is larger than {limit} bytes", code="request_too_large")
        return b"".join(parts)


def _bearer(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return bytes(value[7:])
    return b""


def _equal(given: bytes, known: str) -> bool:
    return hmac.compare_digest(given, known.encode())


async def answer(error: ApiError, send: Send) -> None:
    """Send an error as the whole response."""
    body = json.dumps(error.body).encode()
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), *error.headers.items()]
    plain = [(name.lower().encode(), value.encode()) for name, value in headers]
    await send({"type": "http.response.start", "status": error.status, "headers": plain})
    await send({"type": "http.response.body", "body": body})
