"""The servers of one section: as many as there should be, started again when they die."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tandem.config.gateway import BackendConfig, GatewayConfig
from tandem.gateway.backend import Backend, Health
from tandem.gateway.servers.autoscale import Decision, Load, Since, decide
from tandem.gateway.servers.places import Machine, Place, place_for
from tandem.gateway.servers.server import Server
from tandem.gateway.servers.update import UpdateState
from tandem.gateway.servers.versions import ModelVersion
from tandem.runtime.process.backoff import Backoff, describe_wait
from tandem.runtime.process.processes import describe_exit
from tandem.types import UserError

_USER_ERROR = UserError("").exit_code
_MOST_DECISIONS = 20
_LONG_LIFE_S = 30.0
"""A server that was ready for so long is no failure of its start when it dies."""


class Members(Protocol):
    """The backends of a running gateway, which servers join and leave."""

    def join(self, backend: Backend) -> None: ...
    def leave(self, backend: Backend) -> None: ...


class Group:
    """The servers of the section ``name``. ``folder``: for their keys, and their logs unless they have a folder of their own. ``waits``: of a model,
    how many requests wait in the gateway and for how many seconds the oldest has. ``transfer_key``: file with the key of the servers with which they exchange
    KV blocks, ``None`` if they exchange none or their flags name one."""

    def __init__(
        self, name: str, gateway: GatewayConfig, machine: Machine, members: Members, folder: Path, say: Callable[[str], None],
        places: Callable[[], Sequence[Place]], waits: Callable[[str], tuple[int, float]], version: ModelVersion,
        transfer_key: Path | None = None,
    ) -> None:  # fmt: skip
        self.name, self.config = name, gateway.servers[name]
        self.model = self.config.model_name(name)
        """For clients."""
        self._apart = {} if transfer_key is None else {"kv-transfer-key": f"@{transfer_key}"}
        self.version = version
        """What servers that are started have."""
        self.update: UpdateState | None = None
        """The last update, which may run still."""
        self.outcomes = {"done": 0, "failed": 0, "stuck": 0}
        self.held_back = 0
        """Servers that are not started, as an update does that."""
        self.servers: list[Server] = []
        self.desired = self.config.count
        self.restarts = 0
        """Servers that died and were started again."""
        self.last_death = ""
        self.decisions: list[tuple[float, int, Decision]] = []
        """The newest changes of the number: when (unix seconds), from how many, and what was decided."""
        self.changes = {"up": 0, "down": 0}
        self._gateway, self._machine, self._members, self._folder, self._say, self._places = gateway, machine, members, folder, say, places
        self._waits, self._since, self._is_asked_for = waits, Since(), False
        self._logs = Path(self.config.log_folder) if self.config.log_folder else folder
        self._backoff, self._long_lives, self._start_s = Backoff(), 0, 0.0
        self._has_served = False
        self._failures = 0
        """Servers that have died in a row before they were ready."""
        self._load_s = 0.0
        """How long the last one took to become ready."""

    @property
    def ready(self) -> list[Server]:
        """The servers that take requests."""
        return [server for server in self.servers if server.backend is not None and server.backend.is_ready]

    @property
    def states(self) -> dict[str, int]:
        """How many servers are ready, loading or leaving."""
        ready, leaving = len(self.ready), sum(server.is_leaving for server in self.servers)
        return {"ready": ready, "loading": len(self.servers) - ready - leaving, "leaving": leaving}

    @property
    def staying(self) -> list[Server]:
        """The servers that count: not those that leave, and not one that an update tries."""
        return [server for server in self.servers if not server.is_leaving and not server.is_candidate]

    @property
    def are_resting(self) -> bool:
        return self.desired == 0 and self._failures < 2

    def coming_s(self) -> float | None:
        self._is_asked_for = self.config.role != "prefill"
        if self._failures > 1 or not (self.config.scale.max_count or self.desired):
            return None
        now = time.monotonic()
        ages = [now - server.began_s for server in self.staying if not server.was_ready]
        return max(0.0, self._load_s - max(ages)) if ages else self._load_s + max(0.0, self._start_s - now)

    def step(self) -> None:
        """Looks after the servers once: takes in those that have an address, takes out those that have ended, and starts what is missing. Raises ``UserError``
        if the first one says that it cannot be started."""
        now = time.monotonic()
        for server in list(self.servers):
            self._look_after(server, now)
        if self.config.scale.max_count and (self.update is None or self.update.is_over):
            self._scale(now)
        for _ in range(self.desired - self.held_back - len(self.staying) if now >= self._start_s else 0):
            self._start()
        for server in _surplus(self.staying, self.desired):
            self.let_go(server)

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

    def _scale(self, now: float) -> None:
        """Follows ``decide``."""
        # Requests that wait in the gateway wait for a server that answers.
        waiting, oldest_s = self._waits(self.model) if self.config.role != "prefill" else (0, 0.0)
        backends = [server.backend for server in self.staying if server.backend is not None]
        engines = [backend.engine for backend in backends if backend.engine is not None]
        load = Load(
            now, waiting=max(waiting, int(self._is_asked_for)) + sum(engine.waiting for engine in engines),
            oldest_s=max([oldest_s, *(engine.oldest_s for engine in engines)]), in_flight=sum(len(backend.attempts) for backend in backends),
            count=self.desired, loading=self.desired - sum(server.was_ready for server in self.staying),
        )  # fmt: skip
        self._is_asked_for = False
        self._since, decision = decide(self.config.scale, self.config.max_requests, self._since, load)
        if decision is None:
            return
        before, self.desired = self.desired, decision.count
        self.changes["up" if decision.count > before else "down"] += 1
        self.decisions = [*self.decisions[1 - _MOST_DECISIONS :], (time.time(), before, decision)]
        self._say(f"servers of {self.name}: {decision.count} instead of {before}: {decision.reason}")

    def follow(self, gateway: GatewayConfig) -> None:
        """Takes other settings, with which the servers that run go on."""
        self._gateway, self.config = gateway, gateway.servers[self.name]
        scale = self.config.scale
        self.desired = min(max(self.desired, scale.min_count), scale.max_count) if scale.max_count else self.config.count
        for server in self.servers:
            if server.backend is not None:
                server.backend.config = replace(server.backend.config, max_requests=self.config.max_requests)

    def use(self, version: ModelVersion) -> None:
        """Has servers that are started from now on serve ``version``."""
        self.version, self._failures, self._start_s = version, 0, 0.0

    def has_room(self) -> bool:
        """Returns whether one more server finds GPUs."""
        return place_for(self.config, self._machine, self._places()) is not None

    def start_candidate(self, version: ModelVersion, old: Server) -> Server:
        """Starts a server of ``version``, on the cores of ``old``, and on its GPUs if it has ended. Raises ``OSError`` if no process can be started."""
        place = place_for(self.config, self._machine, self._places())
        server = self._launch(version, replace(place, cores=old.place.cores) if place is not None else old.place)
        server.is_candidate = True
        return server

    def let_go(self, server: Server) -> None:
        """Gives a server nothing new; it ends when it has finished what it has."""
        server.is_leaving = True
        if server.backend is not None:
            server.backend.is_leaving = True

    def _start(self) -> None:
        place = place_for(self.config, self._machine, self._places())
        if place is None:  # One that still ends has its GPUs.
            return
        try:
            self._launch(self.version, place)
        except OSError as error:
            self._failures += 1
            wait_s = self._wait_s()
            self._say(f"a server of {self.name} cannot be started: {error}; it is tried again {describe_wait(wait_s)}")

    def _wait_s(self) -> float:
        """Counts a loss; returns the time until the next start."""
        wait_s = self._backoff.wait_s(self._long_lives)
        self._start_s = time.monotonic() + wait_s
        return wait_s

    def _launch(self, version: ModelVersion, place: Place) -> Server:
        taken = {server.name for server in self.servers}
        name = next(name for number in range(len(taken) + 1) if (name := f"{self.name}-{number}") not in taken)
        server = Server.start(name, version, {"role": self.config.role, **self._apart, **self.config.flags}, self.model, place, self._folder, self._logs)
        self.servers.append(server)
        self._say(f"server {name} loads '{version.path}'{_described(place)}")
        return server

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
            if not server.was_ready:
                self._load_s = now - server.began_s
            server.was_ready = self._has_served = True
            self._failures = 0
        elif not server.was_ready:
            self._check_time(server, now)

    def _take_in(self, server: Server, now: float) -> None:
        """Makes a server with an address one of the gateway's backends."""
        address = server.address
        if address is None:
            self._check_time(server, now)
            return
        config = BackendConfig(url=address, name=server.name, models=(self.model,), role=self.config.role, max_requests=self.config.max_requests)
        server.backend = Backend.make(config, self._gateway.breaker, server.api_key, self._gateway.router.slow_start_s)
        server.backend.is_leaving = server.is_candidate
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
        how = f"{server.why or describe_exit(status)}{f'; its last line: {words}' if words else ''}"
        if server.is_candidate:
            server.why = how
            return
        if status == _USER_ERROR and not self._has_served:
            raise UserError(f"server {server.name} ended at its start: {words}")
        self.last_death = f"{server.name}: {how}"
        self.restarts += 1
        self._failures = 0 if server.was_ready else self._failures + 1
        self._long_lives += server.was_ready and now - server.began_s > _LONG_LIFE_S
        self._say(f"server {self.last_death}; it is started again {describe_wait(self._wait_s())}")


def _surplus(staying: Sequence[Server], desired: int) -> list[Server]:
    """Returns the servers that end so that ``desired`` stay: first those that are not ready, then those with the fewest requests, of equal ones the newest."""

    def order(server: Server) -> tuple[bool, int, float]:
        return server.was_ready, len(server.backend.attempts) if server.backend is not None else 0, -server.began_s

    return sorted(staying, key=order)[: max(0, len(staying) - desired)]


def _described(place: Place) -> str:
    where = [f"GPU {', '.join(place.gpus)}" if place.gpus else "", f"core {', '.join(map(str, place.cores))}" if place.cores else ""]
    return "".join(f" on {each}" for each in where if each)
