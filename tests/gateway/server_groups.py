"""A group of servers in this process, whose servers are processes of their own that start at once."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from http_processes import LIMIT_S

from tandem.config.gateway import GatewayConfig
from tandem.config.load import build
from tandem.gateway.backend import Attempt, Backend
from tandem.gateway.probes import Probes
from tandem.gateway.servers.group import Group
from tandem.gateway.servers.places import Machine, Place
from tandem.gateway.servers.server import Server
from tandem.gateway.servers.updates import Updates
from tandem.gateway.servers.versions import ModelVersion
from tandem.runtime.process.processes import Threads, spawn
from tandem.types import WeightVersion


def stand_in(
    name: str, version: ModelVersion, flags: Mapping[str, Any], served_name: str, place: Place, folder: Path, logs: Path
) -> Server:
    log = logs / f"{name}.log"
    begin = log.stat().st_size if log.exists() else 0
    arguments = [str(Path(__file__).with_name("stand_in_server.py")), name, version.path, served_name, str(version.weights.incarnation)]
    process = spawn(None, arguments, program=sys.executable, threads=Threads(1), output=log, new_session=True, environment=place.environment)
    return Server(name, version, place, log, "", "", process, _log_begin=begin)


@dataclass
class Running:
    """A group that is stepped in the background, and what it has said. ``failure``: why it ended."""

    group: Group
    backends: list[Backend]
    probes: Probes
    said: list[str] = field(default_factory=list)
    failure: BaseException | None = None
    updates: Updates = field(init=False)
    waits: tuple[int, float] = (0, 0.0)
    """What waits in the gateway."""

    def join(self, backend: Backend) -> None:
        self.backends.append(backend)
        self.probes.add(backend)

    def leave(self, backend: Backend) -> None:
        self.backends.remove(backend)
        self.probes.remove(backend)

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                while not condition():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"waited {LIMIT_S:g} s for {what}; {self.said}") from None

    async def until_ready(self, count: int) -> None:
        # A backend answers its probe before the group's next step takes note of it, and until then an update prefers the servers that are noted.
        await self.until(
            lambda: len(self.group.ready) == count == len(self.group.servers) and all(server.was_ready for server in self.group.servers), f"{count} servers"
        )

    def take(self, server: Server) -> Attempt:
        """Begins a request at ``server``; it must be in a task."""
        assert server.backend is not None
        return server.backend.take(10)


@contextlib.asynccontextmanager
async def running_group(folder: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine | None = None, **settings: Any) -> AsyncIterator[Running]:
    """Runs a group of the section ``m`` with ``settings``; ends its processes."""
    monkeypatch.setattr(Server, "start", stand_in)
    probes = {"interval_s": 0.05, "timeout_s": 5.0}
    config = build(GatewayConfig, {"servers": {"m": {"model": "model", **settings}}, "probes": probes})
    async with aiohttp.ClientSession() as session:
        backends: list[Backend] = []
        said: list[str] = []
        running = Running(None, backends, Probes(config.probes, backends, session, said.append), said)  # type: ignore[arg-type]

        def places() -> list[Place]:
            return [each.place for each in running.group.servers]

        model = config.servers["m"].model
        version = ModelVersion(model, model, WeightVersion(0, 0))
        running.group = Group("m", config, machine or Machine((), (), 1), running, folder, said.append, places, lambda _: running.waits, version)
        running.updates = Updates([running.group], "", {}, folder, session, said.append)

        async def step() -> None:
            try:
                while True:
                    running.group.step()
                    await asyncio.sleep(0.01)
            except Exception as error:
                running.failure = error

        stepping = asyncio.create_task(step())
        try:
            yield running
        finally:
            stepping.cancel()
            await running.updates.stop()
            await asyncio.gather(stepping, running.probes.stop(), return_exceptions=True)
            await running.group.stop()
            assert all(server.process.poll() is not None for server in running.group.servers)
