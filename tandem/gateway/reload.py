"""Follows a change of the gateway's file while it serves: requests in flight end as they began, and new ones find the new settings."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import aiohttp

from tandem.config.gateway import GatewayConfig, LimitConfig, TenantConfig
from tandem.gateway.app import GatewayState
from tandem.gateway.backend import Backend
from tandem.gateway.ejection import bound_ejections
from tandem.gateway.probes import Probes
from tandem.gateway.routing.model_routes import ModelRoutes
from tandem.gateway.waits import watch_waits
from tandem.serving.http_process import say
from tandem.types import UserError

_FOLLOWED = (
    "backends", "balance", "zone", "routes", "timeouts", "probes", "breaker", "retry", "tenants", "other_tenants", "model_limits", "drain_s",
)  # fmt: skip
"""The keys whose change is followed. Of ``timeouts`` all but ``connect_s``, of tenants their limits."""


@dataclass
class Reload:
    """What of a running gateway follows its file. ``read``: reads the file again, ``None`` for a gateway that was started without one. ``make``: makes the
    backends of settings. ``backends``: those in use, a list that other parts hold too."""

    state: GatewayState
    session: aiohttp.ClientSession
    stages: Mapping[str, str]
    backends: list[Backend]
    read: Callable[[], GatewayConfig] | None
    make: Callable[[GatewayConfig], list[Backend]]
    probes: Probes = field(init=False)
    _retired: list[Backend] = field(default_factory=list)
    _waits: "asyncio.Task[None]" = field(init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self) -> None:
        """Begins to probe the backends and to watch what they owe."""
        self.probes = Probes(self.state.config.probes, self.backends, self.session, say)
        self._watch()
        await self.probes.start()

    async def stop(self) -> None:
        self._waits.cancel()
        await asyncio.gather(self._waits, self.probes.stop(), return_exceptions=True)

    async def reload(self) -> list[str]:
        """Reads the file again and follows it; returns the keys that have changed. Raises ``UserError``, after which nothing has, for a file that is not
        right or a change that needs a restart."""
        if self.read is None:
            raise UserError("the gateway was started without a file of settings; there is nothing to read again")
        async with self._lock:
            before, config = self.state.config, self.read()
            changed = [each.name for each in fields(GatewayConfig) if getattr(before, each.name) != getattr(config, each.name)]
            _check_followed(before, config, changed)
            made = self.make(config)
            known = {(backend.name, backend.config.url): backend for backend in self.backends}
            fresh = [backend for backend in made if (backend.name, backend.config.url) not in known]
            # The new ones are ready, or known not to be, when they get their first request.
            first = Probes(config.probes, fresh, self.session, say)
            await asyncio.gather(*map(first.probe, fresh))
            kept = [_follow(known[key], backend, config) if (key := (backend.name, backend.config.url)) in known else backend for backend in made]
            await self._replace(config, kept)
        say(f"the settings were read again; {', '.join(changed) or 'nothing'} changed")
        return changed

    async def _replace(self, config: GatewayConfig, backends: list[Backend]) -> None:
        state = self.state
        gone = [backend for backend in self.backends if backend not in backends]
        # What is in flight at a backend that is gone is watched to its end.
        self._retired = [backend for backend in [*self._retired, *gone] if backend.attempts]
        self.backends[:] = backends
        bound_ejections(self.backends, config.breaker.max_share)
        state.pool.follow(config)
        state.proxy.follow(config)
        state.routes = ModelRoutes(config.routes, state.pool, self.stages)
        state.auth.follow(config)
        state.config = config
        for backend in gone:
            state.metrics.forget(backend)
        old, self.probes = self.probes, Probes(config.probes, self.backends, self.session, say)
        self._waits.cancel()
        self._watch()
        await old.stop()
        await self.probes.start()
        state.admission.wake()

    def _watch(self) -> None:
        watched = [*self.backends, *self._retired]
        self._waits = asyncio.create_task(watch_waits(self.state.config.timeouts, watched, self.state.admission.wake))


def _check_followed(before: GatewayConfig, config: GatewayConfig, changed: list[str]) -> None:
    """Raises ``UserError`` for a change that needs a restart."""
    wanted = next((f"'{name}'" for name in changed if name not in _FOLLOWED), None)
    if before.timeouts.connect_s != config.timeouts.connect_s:
        wanted = "'timeouts.connect_s'"
    for name in sorted({*before.tenants, *config.tenants}):
        if _but_limits(before.tenants.get(name, before.other_tenants)) != _but_limits(config.tenants.get(name, config.other_tenants)):
            wanted = f"what is not a limit in 'tenants.{name}'"
    if _but_limits(before.other_tenants) != _but_limits(config.other_tenants):
        wanted = "what is not a limit in 'other_tenants'"
    if wanted:
        raise UserError(f"{wanted} cannot change while the gateway runs; restart it, or put back what was there")


def _but_limits(tenant: TenantConfig) -> TenantConfig:
    return replace(tenant, limits=LimitConfig(), models={})


def _follow(backend: Backend, made: Backend, config: GatewayConfig) -> Backend:
    """Gives a backend that stays the settings of ``made``; its load, health and breaker are those that it has."""
    if backend.config.models != made.config.models:
        backend.models = made.config.models or backend.models
    backend.config, backend.api_key, backend.tls, backend.slow_start_s = made.config, made.api_key, made.tls, made.slow_start_s
    backend.breaker.follow(config.breaker)
    return backend
