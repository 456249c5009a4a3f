"""Sends an error as the whole answer to a request."""

import asyncio
import contextlib
import json

from starlette.types import Receive, Send

from tandem.serving.errors import ApiError, error_body, id_headers

_LINGER_S = 5.0


async def answer(error: ApiError, send: Send, rest: Receive | None, path: str = "", request_id: str = "") -> None:
    """Send an error as the whole response, in the form of ``path``, with the id of the request if there is one. ``rest``: the rest of the request's body,
    which is read and thrown away for a few seconds: a connection that is closed with unread bytes is reset, and its client would not see the answer."""
    body = json.dumps(error_body(error, path, request_id)).encode()
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), *error.headers.items()]
    plain = [*((name.lower().encode(), value.encode()) for name, value in headers), *(id_headers(path, request_id) if request_id else [])]
    await send({"type": "http.response.start", "status": error.status, "headers": plain})
    await send({"type": "http.response.body", "body": body, "more_body": rest is not None})
    if rest is None:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (message := await rest())["type"] == "http.request" and message.get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})
