"""Calls to a sidecar from other machines: HTTP by Starlette and uvicorn, with the frames of the channel as bodies.

``POST /call/NAME`` with ``Authorization: Bearer CREDENTIAL`` and one frame as its body; the answer is a stream of frames that ends with the
response. ``GET /health`` answers without a credential. Needs the extra ``serve``; sidecars of one machine use ``rpc_server``, which starts
without it. With ``tls`` callers show a certificate of a pod before anything is read, ``/health`` included; without it nothing is encrypted.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tandem.runtime.process.waits import WAITS
from tandem.runtime.rpc.call_server import CallServer, run_call
from tandem.runtime.rpc.calls import Method
from tandem.runtime.rpc.patient_protocol import PatientProtocol
from tandem.runtime.rpc.pod_tls import PodTls
from tandem.runtime.rpc.traced import sent_with
from tandem.types.wire import Frame, decode, encode


class HttpServer(CallServer):
    """Answers calls over HTTP. A connection beyond ``max_connections`` is answered with status 503. See ``CallServer`` for the arguments."""

    def __init__(self, methods: Mapping[str, Method], credential: str, *, name: str, tls: PodTls | None = None, **options: Any) -> None:
        self._tls = tls
        super().__init__(methods, credential, name=name, **options)

    def _open(self) -> None:
        routes = [Route("/call/{name}", self._call, methods=["POST"]), Route("/health", _health)]
        protocol = type("Protocol", (PatientProtocol,), {"request_s": self.request_s, "stall_s": self.request_s})
        config = uvicorn.Config(
            Starlette(routes=routes), http=protocol, log_config=None, access_log=False, lifespan="off", loop="asyncio",
            limit_concurrency=self.max_connections + 1, timeout_graceful_shutdown=1, server_header=False,
        )  # fmt: skip
        config.load()
        config.ssl = None if self._tls is None else self._tls.server
        self._server = uvicorn.Server(config)

    def serve_forever(self) -> None:
        """Answers calls from this thread until ``close``."""
        self._server.run([self._listener])

    def _stop(self) -> None:
        self._server.should_exit = True

    async def _call(self, request: Request) -> Response:
        scheme, _, credential = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not self._is_credential(credential):
            return _refusal(401, "wrong credential")
        name = str(request.path_params["name"])
        method = self.methods.get(name)
        if method is None:
            return _refusal(404, f"{self.name} has no call '{name}'")
        length = request.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            return _refusal(411, "a call needs a Content-Length")
        if int(length) > self.max_body_bytes:
            return _refusal(413, f"a call of {length} bytes; at most {self.max_body_bytes} are allowed")
        try:
            async with asyncio.timeout(self.request_s):
                call = decode(await request.body())
        except TimeoutError:
            return _refusal(408, f"the call did not arrive within {self.request_s:g} s")
        except ClientDisconnect:
            return _refusal(400, "the caller closed the connection")
        except ValueError as error:
            return _refusal(400, str(error))
        return StreamingResponse(self._answer(method, call), media_type="application/octet-stream")

    async def _answer(self, method: Method, call: Frame) -> AsyncIterator[bytes]:
        """Runs the call in a thread of its own and yields its frames, and a heartbeat after each ``heartbeat_s`` without one."""
        loop = asyncio.get_running_loop()
        frames: asyncio.Queue[bytes | None] = asyncio.Queue()

        def put(frame: bytes | None) -> None:
            with contextlib.suppress(RuntimeError):  # The server was closed meanwhile.
                loop.call_soon_threadsafe(frames.put_nowait, frame)

        def run() -> None:
            try:
                run_call(method, call, lambda meta, blobs, kind: put(encode(meta, blobs, kind, "", 0, *sent_with(kind))))
            finally:
                put(None)

        threading.Thread(target=run, name=f"{self.name}-call", daemon=True).start()
        while True:
            try:
                async with asyncio.timeout(self.heartbeat_s):
                    frame = await frames.get()
            except TimeoutError:
                frame = encode(WAITS.heartbeat_meta(), kind="heartbeat")
            if frame is None:
                return
            yield frame


async def _health(request: Request) -> Response:
    return PlainTextResponse("alive\n")


def _refusal(status: int, text: str) -> Response:
    headers: dict[str, Any] = {"Connection": "close"}
    return PlainTextResponse(text + "\n", status, headers)
