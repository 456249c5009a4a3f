"""The servers of one model: as many as there should be, started again when they die."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tandem.config.gateway import BackendConfig, GatewayConfig
from tandem.gateway.backend import Backend, Health
from tandem.gateway.servers.places import Machine, Place, place_for
from tandem.gateway.servers.server import Server
from tandem.runtime.process.backoff import Backoff, describe_wait
from tandem.runtime.process.processes import describe_exit
from tandem.types import UserError

_USER_ERROR = UserError("").exit_code
_LONG_LIFE_S = 30.0
"""A server that was ready for so long is no failure of its start when it dies."""


class Members(Protocol):
    """The backends of a running gateway, which servers join and leave."""

    def join(self, backend: Backend) -> None: ...
    def leave(self, backend: Backend) -> None: ...


class Group:
    """The servers of the section ``name``. ``folder``: for their keys, and their logs unless they have a folder of their own."""

    def __init__(
        self, name: str, gateway: GatewayConfig, machine: Machine, members: Members, folder: Path, say: Callable[[str], None],
        places: Callable[[], Sequence[Place]],
    ) -> None:  # fmt: skip
        self.name, self.config = name, gateway.servers[name]
        self.servers: list[Server] = []
        self.desired = self.config.count
        self.restarts = 0
        """Servers that died and were started again."""
        self.last_death = ""
        self._gateway, self._machine, self._members, self._folder, self._say, self._places = gateway, machine, members, folder, say, places
        self._logs = Path(self.config.log_folder) if self.config.log_folder else folder
        self._backoff, self._long_lives, self._start_s = Backoff(), 0, 0.0
        self._has_served = False

    @property
    def ready(self) -> list[Server]:
        """The servers that take requests."""
        return [server for server in self.servers if server.backend is not None and server.backend.is_ready]

    def step(self) -> None:
        """Looks after the servers once: takes in those that have an address, takes out those that have ended, and starts what is missing. Raises ``UserError``
        if the first one says that it cannot be started."""
        now = time.monotonic()
        for server in list(self.servers):
            self._look_after(server, now)
        staying = [server for server in self.servers if not server.is_leaving]
        for _ in range(self.desired - len(staying) if now >= self._start_s else 0):
            self._start()

    async def stop(self) -> None:
        """Ends all servers; what they still compute ends with them after a while."""
        for server in self.servers:
            server.end()
        while any(server.process.poll() is None for server in self.servers):
            for server in self.servers:
                if server.kill_s is not None and time.monotonic() > server.kill_s:
                    server.kill()
            await asyncio.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Ends all servers, and what they have started, at once."""
        for server in self.servers:
            server.kill()

    def _start(self) -> None:
        place = place_for(self.config, self._machine, self._places())
        if place is None:  # One that still ends has its GPUs.
            return
        taken = {server.name for server in self.servers}
        name = next(name for number in range(len(taken) + 1) if (name := f"{self.name}-{number}") not in taken)
        flags = self.config.flags
        self.servers.append(Server.start(name, self.config.model, flags, self.name, place, self._folder, self._logs))
        self._say(f"server {name} loads '{self.config.model}'{_described(place)}")

    def _look_after(self, server: Server, now: float) -> None:
        if server.process.poll() is not None:
            self._ended(server, now)
        elif server.kill_s is not None:
            if now > server.kill_s:
                server.kill()
        elif server.is_leaving and (server.backend is None or not server.backend.attempts):
            self._take_out(server)
            server.end()
        elif server.backend is None:
            self._take_in(server, now)
        elif server.backend.health is Health.READY:
            server.was_ready = self._has_served = True
        elif not server.was_ready:
            self._check_time(server, now)

    def _take_in(self, server: Server, now: float) -> None:
        """Makes a server with an address one of the gateway's backends."""
        address = server.address
        if address is None:
            self._check_time(server, now)
            return
        config = BackendConfig(url=address, name=server.name, models=(self.name,), max_requests=self.config.max_requests)
        server.backend = Backend.make(config, self._gateway.breaker, server.api_key, self._gateway.router.slow_start_s)
        self._members.join(server.backend)

    def _take_out(self, server: Server) -> None:
        if server.backend is not None:
            backend, server.backend = server.backend, None
            self._members.leave(backend)

    def _check_time(self, server: Server, now: float) -> None:
        if now - server.began_s > self.config.start_s:
            server.why = f"it was not ready within {self.config.start_s:g} s"
            server.kill()

    def _ended(self, server: Server, now: float) -> None:
        """Takes out a server whose process has ended, and says why, unless it was to end. Raises ``UserError``."""
        self.servers.remove(server)
        self._take_out(server)
        # What it has started ends with it.
        server.kill()
        if server.is_leaving:
            self._say(f"server {server.name} has ended")
            return
        status, words = server.process.returncode, server.last_words
        if status == _USER_ERROR and not self._has_served:
            raise UserError(f"server {server.name} ended at its start: {words}")
        how = server.why or describe_exit(status)
        self.last_death = f"{server.name}: {how}{f'; its last line: {words}' if words else ''}"
        self.restarts += 1
        self._long_lives += server.was_ready and now - server.began_s > _LONG_LIFE_S
        wait_s = self._backoff.wait_s(self._long_lives)
        self._start_s = now + wait_s
        self._say(f"server {self.last_death}; it is started again {describe_wait(wait_s)}")


def _described(place: Place) -> str:
    where = [f"GPU {', '.join(place.gpus)}" if place.gpus else "", f"core {', '.join(map(str, place.cores))}" if place.cores else ""]
    return "".join(f" on {each}" for each in where if each)
