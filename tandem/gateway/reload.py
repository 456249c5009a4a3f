"""Follows a change of the gateway's file while it serves: requests in flight end as they began, and new ones find the new settings."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from ssl import SSLContext
from typing import TYPE_CHECKING

import aiohttp

from tandem.config.gateway import GatewayConfig
from tandem.gateway.app import GatewayState
from tandem.gateway.audit import AuditFile
from tandem.gateway.backend import Backend
from tandem.gateway.ejection import bound_ejections
from tandem.gateway.extras import check_extras, make_tokens
from tandem.gateway.keys import KeyFile
from tandem.gateway.probes import Probes
from tandem.gateway.routing.model_routes import ModelRoutes
from tandem.gateway.upstream import Upstream
from tandem.gateway.waits import watch_waits
from tandem.runtime.tls import TlsFiles
from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.gateway.oidc import Tokens

NEEDS_RESTART = (
    "host", "port", "workers", "trusted_proxies", "registry", "max_body_mib", "request_s", "stall_s", "max_connections_per_client", "log_requests", "redis",
    "targets_folder", "traces", "log_folder",
)  # fmt: skip
"""The keys whose change is not followed: those of the address and of connections, and where limits are counted. Also ``timeouts.connect_s``, what
servers are started with, and whether there
is ``tls`` and clients need certificates."""
_KEYS_S = 1.0
"""How often the key file is looked at: a revoked key ends within this time."""


@dataclass(frozen=True)
class _Fresh:
    """What a change of settings needs, made before anything is changed."""

    backends: list[Backend]
    keys: KeyFile | None
    tokens: "Tokens | None"
    tls: tuple[SSLContext, str] | None
    """For ``ServerTls.follow``; ``None`` if certificate and key are those in use."""
    audit: AuditFile | None


@dataclass
class Reload:
    """What of a running gateway follows its file. ``read``: reads the file again, ``None`` for a gateway that was started without one. ``make``: makes the
    backends of settings. ``backends``: those in use, a list that other parts hold too."""

    state: GatewayState
    session: aiohttp.ClientSession
    upstream: Upstream
    stages: Mapping[str, str]
    backends: list[Backend]
    read: Callable[[], GatewayConfig] | None
    make: Callable[[GatewayConfig], list[Backend]]
    joined: list[Backend] = field(default_factory=list)
    """Those that are not in the file: servers that the gateway has started."""
    probes: Probes = field(init=False)
    _retired: list[Backend] = field(default_factory=list)
    _waits: "asyncio.Task[None]" = field(init=False)
    _keys: "asyncio.Task[None]" = field(init=False)
    _tokens: "asyncio.Task[None] | None" = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self) -> None:
        """Begins to probe the backends, to watch what they owe, and to follow the key file and the keys of the tokens' issuer."""
        self.probes = Probes(self.state.config.probes, self.backends, self.session, self.state.say)
        self._watch()
        self._keys = asyncio.create_task(self._refresh_keys())
        self._follow_issuer()
        await self.probes.start()

    async def stop(self) -> None:
        tasks = [self._waits, self._keys, *([self._tokens] if self._tokens is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self.probes.stop(), return_exceptions=True)
        if self.state.audit is not None:
            self.state.audit.close()

    def join(self, backend: Backend) -> None:
        """Makes ``backend``, which is not in the file, one of the gateway's."""
        backend.breaker.follow(self.state.config.breaker)
        self.joined.append(backend)
        self.backends.append(backend)
        bound_ejections(self.backends, self.state.config.breaker.max_share)
        self.probes.add(backend)
        self._watch_again()

    def leave(self, backend: Backend) -> None:
        """Takes out a backend that has joined; what it has in flight ends there."""
        self.joined.remove(backend)
        self.backends.remove(backend)
        bound_ejections(self.backends, self.state.config.breaker.max_share)
        self._retire([backend])
        self.probes.remove(backend)
        self._watch_again()

    async def reload(self) -> list[str]:
        """Reads the file again and follows it; returns the keys that have changed. Raises ``UserError``, after which nothing has, for a file that is not
        right, an issuer of tokens that does not answer, or a change that needs a restart."""
        if self.read is None:
            raise UserError("the gateway was started without a file of settings; there is nothing to read again")
        async with self._lock:
            before, config = self.state.config, self.read()
            changed = [each.name for each in fields(GatewayConfig) if getattr(before, each.name) != getattr(config, each.name)]
            _check_followed(before, config, changed)
            self.state.servers.check(config)
            check_extras(config)
            made = self.make(config)
            known = {(backend.name, backend.config.url): backend for backend in self.backends if backend not in self.joined}
            fresh = [backend for backend in made if (backend.name, backend.config.url) not in known]
            # The new ones are ready, or known not to be, when they get their first request.
            first = Probes(config.probes, fresh, self.session, self.state.say)
            await asyncio.gather(*map(first.probe, fresh))
            tls = None if self.state.tls is None else self.state.tls.fresh(TlsFiles.of(config.tls))
            keys, tokens, audit = await self._made(config)
            kept = [_follow(known[key], backend, config) if (key := (backend.name, backend.config.url)) in known else backend for backend in made]
            await self._replace(config, _Fresh([*kept, *self.joined], keys, tokens, tls, audit))
            changed += ["tls"] if tls is not None and "tls" not in changed else []
        self.state.say(f"the settings were read again; {', '.join(changed) or 'nothing'} changed")
        return changed

    async def _made(self, config: GatewayConfig) -> "tuple[KeyFile | None, Tokens | None, AuditFile | None]":
        """Returns key file, tokens and audit log of ``config``: those in use where it names the same. Raises ``UserError``."""
        state, before = self.state, self.state.config
        keys, tokens, audit = state.auth.keys, state.auth.tokens, state.audit
        if config.keys_file != before.keys_file:
            keys = KeyFile(Path(config.keys_file)) if config.keys_file else None
        if config.oidc != before.oidc:
            tokens = make_tokens(config, self.state.say)
            problem = "" if tokens is None else await tokens.read(self.session)
            if problem:
                raise UserError(f"the keys of {config.oidc.issuer} cannot be read: {problem}; correct 'oidc'")
        if config.audit_log != before.audit_log:
            # Last: nothing that is refused leaves a file open.
            audit = AuditFile(Path(config.audit_log)) if config.audit_log else None
        return keys, tokens, audit

    async def _replace(self, config: GatewayConfig, fresh: _Fresh) -> None:
        state, backends = self.state, fresh.backends
        gone = [backend for backend in self.backends if backend not in backends]
        self.backends[:] = backends
        bound_ejections(self.backends, config.breaker.max_share)
        for backend in self.joined:
            backend.breaker.follow(config.breaker)
        state.pool.follow(config)
        state.proxy.follow(config)
        state.routes = ModelRoutes(config.routes, state.pool, self.stages)
        state.admission.follow(config)
        state.servers.follow(config)
        state.auth.follow(config, fresh.keys, fresh.tokens)
        self.upstream.passes_keys = not state.auth.needs_key
        if state.tls is not None and fresh.tls is not None:
            state.tls.follow(fresh.tls)
        ended, state.audit = state.audit, fresh.audit
        if config.oidc != state.config.oidc:
            self._follow_issuer()
        state.config = config
        self._retire(gone)
        old, self.probes = self.probes, Probes(config.probes, self.backends, self.session, self.state.say)
        self._watch_again()
        if ended is not None and ended is not fresh.audit:
            await asyncio.to_thread(ended.close)
        await old.stop()
        await self.probes.start()
        state.admission.wake()

    def _follow_issuer(self) -> None:
        if self._tokens is not None:
            self._tokens.cancel()
        tokens = self.state.auth.tokens
        self._tokens = None if tokens is None else asyncio.create_task(tokens.keep(self.session))

    async def _refresh_keys(self) -> None:
        """Reads the key file again whenever it has changed, for ever."""
        said = None
        while True:
            await asyncio.sleep(_KEYS_S)
            keys = self.state.auth.keys
            changes = {} if keys is None else keys.refresh()
            if changes and self.state.audit is not None:
                self.state.audit.act("keys", "the key file", **changes)
            problem = None if keys is None else keys.problem
            if problem != said:
                said = problem
                self.state.say(f"the keys stay as they were: {said}" if said else "the key file can be read again")

    def _retire(self, gone: list[Backend]) -> None:
        """What is in flight at backends that are gone is watched to its end."""
        self._retired = [backend for backend in [*self._retired, *gone] if backend.attempts]
        for backend in gone:
            self.state.metrics.forget(backend)

    def _watch_again(self) -> None:
        self._waits.cancel()
        self._watch()

    def _watch(self) -> None:
        watched = [*self.backends, *self._retired]
        self._waits = asyncio.create_task(watch_waits(self.state.config.timeouts, watched, self.state.admission.wake))


def _check_followed(before: GatewayConfig, config: GatewayConfig, changed: list[str]) -> None:
    """Raises ``UserError`` for a change that needs a restart."""
    wanted = next((name for name in changed if name in NEEDS_RESTART), None)
    if before.timeouts.connect_s != config.timeouts.connect_s:
        wanted = "timeouts.connect_s"
    if before.tls.is_on != config.tls.is_on:
        wanted = "tls"
    elif bool(before.tls.client_ca_file) != bool(config.tls.client_ca_file):
        wanted = "tls.client_ca_file"
    gone = next((name for name in before.servers if name not in config.servers), None)
    wanted = wanted or (None if gone is None else f"servers.{gone}")
    for name, servers in config.servers.items():
        servers.refuse_restart(name, before.servers.get(name))
    if wanted:
        raise UserError(f"'{wanted}' cannot change while the gateway runs; restart it, or put back what was there")


def _follow(backend: Backend, made: Backend, config: GatewayConfig) -> Backend:
    """Gives a backend that stays the settings of ``made``; its load, health and breaker are those that it has."""
    if backend.config.models != made.config.models:
        backend.models = made.config.models or backend.models
    backend.config, backend.api_key, backend.tls, backend.slow_start_s = made.config, made.api_key, made.tls, made.slow_start_s
    backend.breaker.follow(config.breaker)
    return backend
