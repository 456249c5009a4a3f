"""Tasks of an event loop."""

import asyncio
from collections.abc import Iterable
from typing import Any


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels ``tasks`` and waits until they have ended, however they do."""
    every = list(tasks)
    for task in every:
        task.cancel()
    await asyncio.gather(*every, return_exceptions=True)
