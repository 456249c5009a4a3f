"""What Tandem's servers say of their engines: free blocks, what waits, and what entered and left their prefix caches (``GET /kv_cache``)."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from tandem.gateway.backend import Backend, EngineState
from tandem.gateway.bounded_body import read_bounded
from tandem.gateway.routing.prefix_index import PrefixIndex
from tandem.runtime.process.tasks import end_tasks

_MOST_BYTES = 2**24
_SKIPPED = 60
"""Looks that are left out after a server has said that it has no such path."""


@dataclass
class _Events:
    """How far the events of a backend were read."""

    stream: str = ""
    after: int = 0
    skips: int = 0


class EngineStates:
    """Looks at each backend every ``interval_s``. ``index``: returns what is corrected by the events. ``wake``: called when something is known anew."""

    def __init__(
        self, interval_s: float, backends: Sequence[Backend], session: aiohttp.ClientSession, index: Callable[[], PrefixIndex | None], wake: Callable[[], None],
    ) -> None:
        self._interval_s, self._backends, self._session, self._index, self._wake = interval_s, backends, session, index, wake

    async def keep(self) -> None:
        """Looks at all backends for ever, each in a task of its own, so that one that hangs delays no other. Follows ``backends`` when it changes."""
        tasks: dict[Backend, asyncio.Task[None]] = {}
        try:
            while True:
                for backend in self._backends:
                    if backend not in tasks:
                        tasks[backend] = asyncio.create_task(self._repeat(backend), name=f"engine state {backend.name}")
                for backend in [each for each in tasks if each not in self._backends]:
                    tasks.pop(backend).cancel()
                await asyncio.sleep(self._interval_s)
        finally:
            await end_tasks(tasks.values())

    async def _repeat(self, backend: Backend) -> None:
        read = _Events()
        while True:
            await asyncio.sleep(self._interval_s)
            read.skips = max(0, read.skips - 1)
            # Behind an address of several servers another one answers each time.
            if not backend.is_tandem or not backend.is_ready or read.skips or backend.config.replicated:
                backend.engine = backend.engine if backend.is_ready else None
                continue
            try:
                async with asyncio.timeout(max(1.0, self._interval_s)):
                    await self._look(backend, read)
                self._wake()
            except (TimeoutError, aiohttp.ClientError, OSError, ValueError, TypeError, KeyError):
                # Whether it works is the probes' business; what it said before no longer counts.
                backend.engine = None

    async def _look(self, backend: Backend, read: _Events) -> None:
        """Raises ``ValueError``, ``TypeError`` or ``KeyError`` for an answer that makes no sense."""
        url = f"{backend.config.url.rstrip('/')}/kv_cache"
        query = {"stream": read.stream, "after": str(read.after)}
        headers = {"Authorization": f"Bearer {backend.api_key}"} if backend.api_key else {}
        async with self._session.get(url, params=query, headers=headers, allow_redirects=False, ssl=backend.tls) as response:
            if response.status != 200:
                read.skips = _SKIPPED if response.status in (404, 405) else 0
                backend.engine = None
                return
            content = json.loads(await read_bounded(response, _MOST_BYTES))
        size = int(content["block_size"])
        tokens = int(content["blocks"]) * size, int(content["free_blocks"]) * size
        backend.said(EngineState(
            *tokens, int(content["waiting"]), int(content["waiting_tokens"]), float(content.get("oldest_waiting_s", 0)),
            role=str(content.get("role", "both")), sends=bool(content.get("sends")), receives=bool(content.get("receives")),
            prefill_tokens_per_s=float(content.get("prefill_tokens_per_s", 0)), transfer_tokens_per_s=float(content.get("transfer_tokens_per_s", 0)),
        ))  # fmt: skip
        index = self._index()
        if index is not None and "events" in content:
            if content["is_reset"]:
                index.forget(backend)
            for event in content["events"]:
                self._apply(index, backend, event, size)
            read.stream, read.after = str(content["stream"]), int(content["last"])

    def _apply(self, index: PrefixIndex, backend: Backend, event: list[Any], block_size: int) -> None:
        kind, *fields = event
        if kind == "stored":
            index.stored(backend, *fields, block_size=block_size)
        elif kind == "removed":
            index.removed(backend, fields[0])
