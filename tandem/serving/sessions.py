"""A client's request while it is answered: its streams, their outputs in order, and what happens when the client leaves."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.engine.processing.outputs import RequestOutput
from tandem.serving.engines.messages import EngineRequest
from tandem.serving.engines.pool import Pool
from tandem.serving.engines.slot import Slot
from tandem.serving.engines.stream import Outputs, Stream
from tandem.serving.errors import ApiError, ClientLeft

DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


@contextlib.contextmanager
def submitted(pool: Pool, requests: Sequence[EngineRequest], preferred: Slot | None = None) -> Iterator[tuple[list[Stream], Outputs]]:
    """Submits all of ``requests`` to engines and aborts the unfinished ones at the end. Raises ``ApiError`` and submits none if there is
    no room for all. ``preferred``: as in ``Pool.submit``."""
    pool.check_room(len(requests))
    for request in requests:
        pool.check_unused(request.id)
    outputs: Outputs = asyncio.Queue()
    streams = [pool.submit(request, outputs, preferred) for request in requests]
    try:
        yield streams, outputs
    finally:
        for stream in streams:
            if not stream.is_over:
                pool.drop(stream)


async def each(outputs: Outputs, count: int) -> AsyncIterator[tuple[Stream, RequestOutput]]:
    """Every output of ``count`` streams, to the end of the last. Raises the first error."""
    while count:
        stream, output = await outputs.get()
        if isinstance(output, ApiError):
            raise output
        count -= output.finished
        yield stream, output


async def answers(pool: Pool, requests: Sequence[EngineRequest], preferred: Slot | None = None) -> list[RequestOutput]:
    """The whole answers of requests that are not streamed, in order. ``preferred``: as in ``Pool.submit``."""
    with submitted(pool, requests, preferred) as (streams, outputs):
        last = {stream: output async for stream, output in each(outputs, len(streams))}
        return [last[stream] for stream in streams]


async def begin(request: Request, events: AsyncGenerator[bytes, None], headers: Callable[[], Mapping[str, str]]) -> "EventStream":
    """The stream of ``events``, once its first is there: what is refused is refused before the answer begins, and a client
    that leaves meanwhile is noticed. ``headers``: of the answer, asked when the first is there."""
    try:
        first = await while_connected(request, _first(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, headers())


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves: ``ClientLeft`` then."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for pending in (task, leaving):
            pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The last of them frees what the others need, also where the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({pump, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pending in (pump, leaving):
                pending.cancel()
            await asyncio.gather(pump, leaving, return_exceptions=True)
            await self._rest.aclose()

    async def _pump(self, send: Send) -> None:
        async def write(part: bytes, more: bool) -> None:
            await send({"type": "http.response.body", "body": part, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await write(self._first, True)
        async for part in self._rest:
            await write(part, True)
        await write(b"", False)


def sse(body: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event, with ``name`` if it has one."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode("utf-8", "replace")
