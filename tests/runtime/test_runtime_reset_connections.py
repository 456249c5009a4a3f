"""A connection that its client resets is forgotten at once, and not when an idle one would be."""

import asyncio
import gc
import importlib.util
import socket
import struct
import weakref
from typing import Any

import pytest
import uvicorn

from tandem.runtime.rpc.patient_protocol import PatientProtocol
from tandem.serving.http_process import HttpServer

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def test_a_connection_that_is_reset_leaves_nothing() -> None:
    resets_leave_nothing(PatientProtocol)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("httptools") is None, reason="httptools is not installed: the other parser is tested")
def test_a_connection_that_is_reset_leaves_nothing_with_httptools() -> None:
    from tandem.runtime.rpc.fast_protocol import FastProtocol

    resets_leave_nothing(FastProtocol)


def resets_leave_nothing(base: Any) -> None:
    made: list[weakref.ref[Any]] = []

    class Protocol(base):  # type: ignore[misc]
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made.append(weakref.ref(self))

    async def run() -> None:
        config = uvicorn.Config(answer, http=Protocol, lifespan="off", log_level="critical", timeout_keep_alive=3600)
        server = HttpServer(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(REQUEST)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                # Without lingering, closing sends a reset.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            async with asyncio.timeout(60):
                while server.server_state.connections or any(each() is not None for each in made):
                    await asyncio.sleep(0.02)
                    gc.collect()
            assert len(made) == 3
            server.should_exit = True
            await serving

    asyncio.run(run())
