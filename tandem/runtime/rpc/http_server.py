"""Calls to a sidecar from other machines: HTTP by Starlette and uvicorn, with the frames of the channel as bodies.

``POST /call/NAME`` with ``Authorization: Bearer CREDENTIAL`` and one frame as its body; the answer is a stream of frames that ends with the
response. ``GET /health`` says, without a credential, that the process is there. Needs the extra ``serve``; sidecars of one machine
use ``rpc_server``, which starts without it. There is no encryption: put it behind a proxy with TLS where the network is not trusted.
"""

import asyncio
import contextlib
import hmac
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.runtime.rpc.calls import Method, StepPoints, error_meta
from tandem.runtime.rpc.patient_protocol import PatientProtocol
from tandem.runtime.rpc.rpc_server import listen
from tandem.types.wire import MAX_FRAME_BYTES, Frame, decode, encode

logger = logging.getLogger(__name__)


class HttpServer:
    """Answers calls, each in a thread of its own. Arguments and errors are those of ``RpcServer``; a call beyond ``max_connections`` is
    answered with status 503."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        credential: str,
        *,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        heartbeat_s: float = 1.0,
        request_s: float = 10.0,
        max_body_bytes: int = MAX_FRAME_BYTES,
        max_connections: int = 64,
        fault_point: FaultPoint = no_fault,
    ) -> None:
        points = StepPoints(fault_point)
        self.name, self.heartbeat_s, self.request_s, self.max_body_bytes = name, heartbeat_s, request_s, max_body_bytes
        self.methods = {call: points.around(call, method) for call, method in methods.items()}
        self._credential = credential.encode()
        self._listener = listen(name, host, port)
        self.port: int = self._listener.getsockname()[1]
        routes = [Route("/call/{name}", self._call, methods=["POST"]), Route("/health", _health)]
        protocol = type("Protocol", (PatientProtocol,), {"request_s": request_s, "stall_s": request_s})
        config = uvicorn.Config(
            Starlette(routes=routes), http=protocol, log_config=None, access_log=False, lifespan="off", loop="asyncio",
            limit_concurrency=max_connections + 1, timeout_graceful_shutdown=1, server_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), name=f"{name}-http", daemon=True)

    def start(self) -> None:
        """Answers from a background thread."""
        self._thread.start()

    def close(self) -> None:
        """Takes no more calls. Calls in progress are left to their threads, which end with the process."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    async def _call(self, request: Request) -> Response:
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, b"Bearer " + self._credential):
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
            return _refusal(400, "the caller left")
        except ValueError as error:
            return _refusal(400, str(error))
        return StreamingResponse(self._answer(method, call), media_type="application/octet-stream")

    async def _answer(self, method: Method, call: Frame) -> AsyncIterator[bytes]:
        """Runs the call in a thread of its own and yields what it says, and every ``heartbeat_s`` that this process is alive."""
        loop = asyncio.get_running_loop()
        spoken: asyncio.Queue[bytes | None] = asyncio.Queue()

        def say(part: bytes | None) -> None:
            with contextlib.suppress(RuntimeError):  # The server was closed meanwhile.
                loop.call_soon_threadsafe(spoken.put_nowait, part)

        def run() -> None:
            try:
                meta, blobs = method(call.meta, call.blobs, lambda progress: say(encode(progress, kind="progress")))
                say(encode(meta, blobs, "result"))
            except BaseException as error:
                say(encode(error_meta(error), kind="error"))
            finally:
                say(None)

        threading.Thread(target=run, name=f"{self.name}-call", daemon=True).start()
        heartbeat = encode({}, kind="heartbeat")
        while True:
            try:
                async with asyncio.timeout(self.heartbeat_s):
                    part = await spoken.get()
            except TimeoutError:
                part = heartbeat
            if part is None:
                return
            yield part


async def _health(request: Request) -> Response:
    return PlainTextResponse("alive\n")


def _refusal(status: int, text: str) -> Response:
    headers: dict[str, Any] = {"Connection": "close"}
    return PlainTextResponse(text + "\n", status, headers)
