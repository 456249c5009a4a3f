"""Ends the work for a client when it leaves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.types import Receive


@dataclass
class ClientWatch:
    """Whether the client has left."""

    has_left: bool = False


@contextlib.asynccontextmanager
async def while_client_waits(receive: Receive) -> AsyncIterator[ClientWatch]:
    """Cancels what it contains when the client leaves, and then ends without an error. ``receive`` has nothing but the client's end left."""
    task, client = asyncio.current_task(), ClientWatch()
    assert task is not None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        client.has_left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield client
    except asyncio.CancelledError:
        if not client.has_left:
            raise
        task.uncancel()
    finally:
        watcher.cancel()
