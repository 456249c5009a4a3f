"""A replica of Ray Serve that owns one ``tandem serve``, and hands it what Serve's proxy sends. No tensor and no token goes through Ray's object store."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import ray
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from yarl import URL

from tandem.config.load import build
from tandem.config.servers import ServersConfig, flag_name
from tandem.gateway.headers import end_to_end, to_backend
from tandem.gateway.servers.places import Place
from tandem.gateway.servers.server import GRACE_S, Server
from tandem.gateway.servers.versions import find_version
from tandem.runtime.process.processes import available_cores, describe_exit
from tandem.runtime.process.temporary import choose_temporary_folder, temporary_folder
from tandem.types import RunError

logger = logging.getLogger("ray.serve")
_LOOK_S, _ANSWER_S = 0.05, 10.0


class Replica:
    """``section``: a ``ServersConfig``. The server ends with this process, whatever ends that."""

    async def __init__(self, section: Mapping[str, Any]) -> None:  # type: ignore[misc]
        config = build(ServersConfig, section, "servers")
        choose_temporary_folder()
        self._stack = contextlib.AsyncExitStack()
        folder = self._stack.enter_context(temporary_folder())
        version = await asyncio.to_thread(find_version, config.model, "", folder, None)
        # Ray has chosen the GPUs, and named them in the environment.
        place = Place((), (), available_cores())
        served = config.served_model_name or Path(config.model).name
        # Prometheus reads a server that names itself to it, from another node too.
        is_read = any(flag_name(key) == "targets_folder" for key in config.flags)
        host = str(ray.util.get_node_ip_address()) if is_read else "127.0.0.1"
        self._server = Server.start("replica", version, config.flags, served, place, folder, folder, host)
        self._stack.callback(self._server.kill)
        # As long as it takes: clients and proxies have limits of their own.
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False))
        try:
            await self._until_ready(config.start_s)
        except BaseException:
            await self._stack.aclose()
            raise
        self._watch = asyncio.create_task(self._end_with_server(), name="server")

    async def __call__(self, request: Request) -> Response:
        headers = to_backend(request.headers.raw, authorization=f"Bearer {self._server.api_key}", client=request.client.host if request.client else "")
        url = URL(f"{self._address}{request.scope['path']}{f'?{request.url.query}' if request.url.query else ''}", encoded=True)
        words = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        answer = await self._session.request(request.method, url, headers=words, data=await request.body(), allow_redirects=False)
        response = StreamingResponse(_relayed(answer), answer.status)
        response.raw_headers = end_to_end(answer.raw_headers)
        return response

    async def check_health(self) -> None:
        """Raises ``RunError`` if the server has ended or is not well; Serve makes another replica then."""
        status = self._server.process.poll()
        if status is not None:
            raise RunError(f"the server ended ({describe_exit(status)}): {self._server.last_words}")
        async with self._session.get(f"{self._address}/health", timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as answer:
            if answer.status != 200:
                raise RunError(f"the server is not well: {(await answer.text())[:400]}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns how many requests wait in the engines, and for how many seconds the oldest has."""
        headers = {"Authorization": f"Bearer {self._server.api_key}"}
        async with self._session.get(f"{self._address}/kv_cache", headers=headers, timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as answer:
            content = await answer.json()
        return {name: float(content[name]) for name in ("waiting", "oldest_waiting_s")}

    async def __del__(self) -> None:
        """Serve calls this when the replica has finished what it had."""
        self._watch.cancel()
        self._server.end()
        ends = time.monotonic() + GRACE_S
        while self._server.process.poll() is None and time.monotonic() < ends:
            await asyncio.sleep(_LOOK_S)
        await self._stack.aclose()

    async def _end_with_server(self) -> None:
        """Ends this process as soon as the server has ended: Serve sends no more requests here, which would fail at once and so look like the least load
        until the next check of the health."""
        while (status := self._server.process.poll()) is None:
            await asyncio.sleep(_LOOK_S)
        logger.error("the server ended (%s): %s", describe_exit(status), self._server.last_words)
        logging.shutdown()
        os._exit(1)

    async def _until_ready(self, limit_s: float) -> None:
        """Raises ``RunError`` if the server does not become ready."""
        ends = time.monotonic() + limit_s
        while True:
            status = self._server.process.poll()
            if status is not None or time.monotonic() > ends:
                why = f"was not ready within {limit_s:g} s" if status is None else f"ended ({describe_exit(status)})"
                raise RunError(f"the server {why}: {self._server.last_words}")
            if (address := self._server.address) is not None:
                self._address = address
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, RunError):
                    await self.check_health()
                    return
            await asyncio.sleep(_LOOK_S)


async def _relayed(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the body as it comes. A client that leaves ends this, and the engine's work with it."""
    async with answer:
        async for part in answer.content.iter_any():
            yield part
