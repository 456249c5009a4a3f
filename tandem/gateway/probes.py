"""Asks every backend, again and again, whether it is ready and which models it serves."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from tandem.config.gateway import ProbeConfig
from tandem.gateway.backend import Backend, Health
from tandem.gateway.bounded_body import read_bounded
from tandem.runtime.process.tasks import end_tasks

_PATHS = ("/readiness", "/health", "/v1/models")
_MODELS_EVERY = 5
"""Probes for each look at the models of a backend that is ready."""
_MOST_BYTES = 2**20
_MOST_MODELS = 1000


class Probes:
    """Probes the backends, each in a task of its own, so that one that hangs delays no other. ``say``: writes a line when the health of a backend changes."""

    def __init__(self, config: ProbeConfig, backends: list[Backend], session: aiohttp.ClientSession, say: Callable[[str], None]) -> None:
        self._config, self._backends, self._session, self._say = config, backends, session, say
        self._paths = {backend.name: backend.config.probe for backend in backends}
        self._failures = dict.fromkeys(self._paths, 0)
        self._count = dict.fromkeys(self._paths, 0)
        self._failing_since = dict.fromkeys(self._paths, 0.0)
        self._tasks: dict[Backend, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Probes all once, then goes on in the background until ``stop``."""
        await asyncio.gather(*(self.probe(backend) for backend in self._backends))
        for backend in self._backends:
            if backend not in self._tasks:
                self._tasks[backend] = asyncio.create_task(self._repeat(backend, self._config.interval_s), name=f"probe {backend.name}")

    def add(self, backend: Backend) -> None:
        """Begins to probe one more, at once."""
        self._paths[backend.name] = backend.config.probe
        self._failures[backend.name] = self._count[backend.name] = 0
        self._failing_since[backend.name] = 0.0
        self._tasks[backend] = asyncio.create_task(self._repeat(backend, 0.0), name=f"probe {backend.name}")

    def remove(self, backend: Backend) -> None:
        """Probes it no longer."""
        if backend in self._tasks:
            self._tasks.pop(backend).cancel()

    async def stop(self) -> None:
        await end_tasks(self._tasks.values())

    async def _repeat(self, backend: Backend, first_s: float) -> None:
        await asyncio.sleep(first_s)
        while True:
            await self.probe(backend)
            await asyncio.sleep(self._config.interval_s)

    async def probe(self, backend: Backend) -> None:
        """Asks ``backend`` once and notes its health and models."""
        why, began = "", time.monotonic()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                status = await self._status(backend)
                if status >= 400 and backend.config.replicated:
                    # One of several servers says so, and the others may be ready.
                    raise ValueError(f"it answers {status}")
                if status < 400 and (backend.health is not Health.READY or self._count[backend.name] % _MODELS_EVERY == 0):
                    await self._read_models(backend)
                self._count[backend.name] += 1
            health = Health.READY if status < 400 else Health.NOT_READY
            why = "" if status < 400 else f"it answers {status}"
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            self._failures[backend.name] += 1
            if isinstance(self._session.connector, aiohttp.TCPConnector):
                # The name may have another address by now, where requests, which look it up themselves, are answered already.
                self._session.connector.clear_dns_cache()
            if self._failures[backend.name] == 1:
                self._failing_since[backend.name] = began
            if self._failures[backend.name] < self._config.failures and backend.health is not Health.UNKNOWN:
                return
            health = Health.DOWN
            why = f"no answer within {self._config.timeout_s:g} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"[:200]
        else:
            self._failures[backend.name] = 0
        self._note(backend, health, why)

    def _note(self, backend: Backend, health: Health, why: str) -> None:
        before, backend.health = backend.health, health
        if health is before:
            return
        if health is Health.DOWN:
            since = self._failing_since[backend.name]
            for attempt in list(backend.attempts):
                # A stream whose parts still come is not ended for a probe that does not.
                if not attempt.has_begun or (attempt.waiting_since is not None and attempt.waiting_since < since):
                    attempt.give_up("it no longer answers probes")
        if before is Health.DOWN:
            backend.breaker.reset()
            backend.restarts += 1
        if health is Health.READY and before is not Health.UNKNOWN:
            backend.came_back()
        text = {Health.READY: "is ready", Health.NOT_READY: "is not ready", Health.DOWN: "is down"}[health]
        if before is not Health.UNKNOWN or health is not Health.READY:
            self._say(f"backend {backend.name} {text}{f' ({why})' if why else ''}")

    def _get(self, backend: Backend, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        url = backend.config.url.rstrip("/") + path
        return self._session.get(url, headers=_headers(backend), allow_redirects=False, ssl=backend.tls)

    async def _status(self, backend: Backend) -> int:
        """Returns the status of the probe. The first path that the backend knows is used from then on."""
        known = self._paths[backend.name]
        for path in (known,) if known else _PATHS:
            async with self._get(backend, path) as response:
                if response.status not in (404, 405) or known:
                    self._paths[backend.name] = path
                    return response.status
        return 404

    async def _read_models(self, backend: Backend) -> None:
        """Raises ``ValueError`` if the answer is not a list of models."""
        async with self._get(backend, "/v1/models") as response:
            if response.status != 200:
                if backend.config.models:
                    return
                raise ValueError(f"/v1/models answers {response.status}")
            text = await read_bounded(response, _MOST_BYTES)
        try:
            entries = [entry for entry in json.loads(text)["data"][:_MOST_MODELS] if isinstance(entry["id"], str)]
            backend.weights = next((_version(entry.get("weight_version")) for entry in entries if entry.get("owned_by") == "tandem"), None)
            backend.models = _served(backend.config.models, entries)
            backend.contexts = {entry["id"]: length for entry in entries if type(length := entry.get("max_model_len")) is int and length > 0}
        except (AttributeError, TypeError, KeyError):
            if not backend.config.models:
                raise ValueError("/v1/models is not a list of models") from None


def _served(configured: tuple[str, ...], entries: list[dict[str, Any]]) -> tuple[str, ...]:
    """Returns the models of a list of models, or those that are ``configured`` and the adapters of theirs that are loaded now."""
    if not configured:
        return tuple(entry["id"] for entry in entries)
    return tuple(dict.fromkeys([*configured, *(entry["id"] for entry in entries if entry.get("parent") in configured)]))


def _version(given: Any) -> str:
    """Returns a version of the weights as ``INCARNATION.STEP``."""
    return ".".join(map(str, given)) if isinstance(given, list) else str(given)


def _headers(backend: Backend) -> dict[str, str]:
    return {"Authorization": f"Bearer {backend.api_key}"} if backend.api_key else {}
