"""The life of a gateway: probe the backends, serve, drain, stop."""

import asyncio
import contextlib
import functools
import gc
import importlib.util
import ipaddress
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from starlette.types import Receive, Scope, Send

from tandem.config.gateway import GatewayConfig
from tandem.config.traces import REQUEST_RATIO
from tandem.gateway.admin import act_for_sibling, learn_drained
from tandem.gateway.admission import Admission
from tandem.gateway.app import GatewayApp, GatewayState
from tandem.gateway.audit import AuditFile, AuditLog, check_audit_log
from tandem.gateway.auth import Auth
from tandem.gateway.backend import Backend
from tandem.gateway.connector import SilentConnector
from tandem.gateway.credentials import backend_key, backend_tls
from tandem.gateway.ejection import bound_ejections
from tandem.gateway.engine_states import EngineStates
from tandem.gateway.extras import check_extras, make_shared_limits, make_tokens
from tandem.gateway.keys import KeyFile, read_keys
from tandem.gateway.metrics import Metrics
from tandem.gateway.occupancy import Occupancy
from tandem.gateway.pool import Pool
from tandem.gateway.proxy import Proxy
from tandem.gateway.rate_limit import EmbeddedLimits, Limits
from tandem.gateway.reload import Reload
from tandem.gateway.routing.model_routes import ModelRoutes
from tandem.gateway.routing.stages import follow_stages, read_stages
from tandem.gateway.servers.servers import running_servers
from tandem.gateway.servers.versions import check_stages
from tandem.gateway.shadow import Shadows
from tandem.gateway.siblings import Place, Siblings
from tandem.gateway.stored_responses import StoredResponses
from tandem.gateway.upstream import KEEP_ALIVE_S, Upstream
from tandem.gateway.workers import run_workers, share_of_worker
from tandem.runtime.exposition.sent_spans import SentSpans
from tandem.runtime.exposition.targets import announced, check_folder
from tandem.runtime.rpc.client_connections import ClientConnections
from tandem.runtime.rpc.listener import listen
from tandem.runtime.tls import ServerTls, TlsFiles, check_tls, expiry_warning
from tandem.runtime.traces.exporter import check_traces, exporting
from tandem.runtime.traces.spans import SPANS
from tandem.serving.bodies import UnfinishedBodies
from tandem.serving.errors import overloaded
from tandem.serving.http_process import BACKLOG, HttpServer, host_of, max_connections, raise_file_limit, say, speaker, stop_events
from tandem.serving.log_lines import RequestLog, setup_beside_terminal
from tandem.serving.refusal import answer
from tandem.serving.traced import RequestTraces
from tandem.types import UserError

_COLLECTED_AT = 10_000
"""Objects more than were freed, at which the garbage collector looks at the newest; Python's own number is 700."""
_OLDER_AFTER = 2
"""Looks at the newest objects until one at older ones, which are few after the start; Python's own number is 10. Requests that were cut leave cycles."""
_DNS_S = 5.0
_MOST_UNFINISHED_BODIES = 4


def run_gateway(config: GatewayConfig, ready: Callable[[str], None] | None = None, read: Callable[[], GatewayConfig] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. ``ready`` is called with the gateway's address when it serves; ``read`` reads the settings
    again after SIGHUP. Raises ``UserError`` if the port or a file cannot be used."""
    check_files(config)
    raise_file_limit()
    if config.workers == 1:
        with listen(config.host, config.port, backlog=BACKLOG) as listener:
            return _run(config, listener, ready, read)

    def serve(share: GatewayConfig, listener: socket.socket, place: Place) -> int:
        again = None if read is None else lambda: share_of_worker(read(), place.number)
        return _run(share, listener, ready if place.announces else None, again, place)

    return run_workers(config, serve, read)


def _run(
    config: GatewayConfig, listener: socket.socket, ready: Callable[[str], None] | None, read: Callable[[], GatewayConfig] | None, place: Place | None = None
) -> int:
    """Serves in this process, which is all of the gateway or the worker at ``place``."""
    made = _Made(
        make_backends(config), KeyFile(Path(config.keys_file)) if config.keys_file else None, read_stages(Path(config.registry)) if config.registry else {},
        AuditFile(Path(config.audit_log)) if config.audit_log else None, ServerTls(TlsFiles.of(config.tls)) if config.tls.is_on else None,
    )  # fmt: skip
    SPANS.identify("gateway")
    if config.log_folder:
        port = listener.getsockname()[1]
        setup_beside_terminal("gateway", config.log_folder, f"gateway-{port}" + ("" if place is None else f"-worker-{place.number}"))
    with exporting(config.traces), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, made, listener, ready, read, place))


def check_files(config: GatewayConfig) -> None:
    """Raises ``UserError`` for a file or a package that is missing or cannot be used."""
    make_backends(config)
    check_extras(config)
    check_traces(config.traces)
    if config.tls.is_on:
        check_tls(TlsFiles.of(config.tls))
    if config.keys_file:
        read_keys(Path(config.keys_file))
    if config.registry:
        check_stages(config.servers, read_stages(Path(config.registry)))
    if config.targets_folder:
        check_folder(config.targets_folder)
    if config.audit_log:
        check_audit_log(Path(config.audit_log))


@dataclass
class _Made:
    """What the settings name, opened."""

    backends: list[Backend]
    keys: KeyFile | None
    stages: dict[str, str]
    audit: AuditFile | None
    tls: ServerTls | None


def make_backends(config: GatewayConfig) -> list[Backend]:
    """Returns the backends of ``config`` with their keys and certificates. Raises ``UserError`` for a file that cannot be read."""
    backends = [Backend.make(backend, config.breaker, backend_key(backend), config.router.slow_start_s, backend_tls(backend)) for backend in config.backends]
    bound_ejections(backends, config.breaker.max_share)
    return backends


def _loop_factory() -> Any:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def _protocol(config: GatewayConfig, connections: ClientConnections) -> type:
    if importlib.util.find_spec("httptools") is None:
        from tandem.runtime.rpc.patient_protocol import PatientProtocol as Base
    else:
        from tandem.runtime.rpc.fast_protocol import FastProtocol as Base  # type: ignore[assignment]
    values = {"request_s": config.request_s, "stall_s": config.stall_s, "connections_of_clients": connections, "refusal": staticmethod(_too_many)}
    return type("Protocol", (Base,), values)


def _most_clients(config: GatewayConfig, tell: Callable[[str], None]) -> int:
    """Returns how many connections clients may have: each can need one to a backend, so that no backend is taken to fail when files run out here. Says so
    where that is less than the settings allow at once."""
    most, wanted = max_connections() // 2, sum(backend.max_requests for backend in config.backends) + config.queue.max_waiting
    if most < wanted:
        tell(f"warning: the limit of open files is room for {most} clients; 'max_requests' and 'queue.max_waiting' allow {wanted}; raise the hard limit "
             "(ulimit -Hn, LimitNOFILE)")  # fmt: skip
    return most


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(overloaded("your address has too many open connections; close some"), send, receive, scope["path"])


async def _serve(
    config: GatewayConfig, made: _Made, listener: socket.socket, ready: Callable[[str], None] | None, read: Callable[[], GatewayConfig] | None,
    place: Place | None,
) -> int:  # fmt: skip
    backends, stages = made.backends, made.stages
    tell = say if place is None else speaker(f"worker {place.number}")
    connector = SilentConnector(limit=0, ttl_dns_cache=int(_DNS_S), keepalive_timeout=KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=config.timeouts.connect_s)
    skipped = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, skip_auto_headers=skipped, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        pool = Pool(config, backends)
        metrics = Metrics(backends, lambda: pool.index)
        admission = Admission(config, pool)
        largest = int(config.max_body_mib * 2**20)
        bodies = UnfinishedBodies(largest * _MOST_UNFINISHED_BODIES, largest * _MOST_UNFINISHED_BODIES)
        shared = make_shared_limits(config, tell)
        limits: Limits = shared or EmbeddedLimits()
        auth = Auth(config, made.keys, make_tokens(config, tell))
        upstream = Upstream(backends, passes_keys=not auth.needs_key, connect_s=config.timeouts.connect_s)
        shadows = Shadows(pool, upstream, metrics)
        proxy = Proxy(config, pool, upstream, metrics, admission, shadows, StoredResponses(pool, upstream, session))
        connections = ClientConnections(_most_clients(config, tell), config.max_connections_per_client)
        routes = ModelRoutes(config.routes, pool, stages)
        state = GatewayState(config, pool, routes, proxy, admission, metrics, bodies, auth, connections, limits, say=tell)
        state.audit, state.tls = made.audit, made.tls
        metrics.registry.register(Occupancy(state, connector, upstream))
        if config.traces is not None:
            metrics.registry.register(SentSpans())
        reload = Reload(state, session, upstream, stages, backends, read, make_backends)
        state.reload = reload.reload
        if read is not None:
            _reload_on_hangup(state)
        beside = [asyncio.create_task(shared.keep())] if shared is not None else []
        beside.append(asyncio.create_task(EngineStates(config.probes.state_s, backends, session, lambda: pool.index, admission.wake).keep()))
        beside += [asyncio.create_task(follow_stages(Path(config.registry), stages, tell))] if config.registry else []
        if place is not None:
            state.siblings = Siblings(place, functools.partial(act_for_sibling, state))
        try:
            await reload.start()
            if state.siblings is not None:
                await state.siblings.start()
                await learn_drained(state)
            async with running_servers(config, reload, admission.waits_of, stages, session, tell) as state.servers:
                pool.own = state.servers.groups
                return await _until_stopped(state, listener, ready)
        finally:
            for task in beside:
                task.cancel()
            if state.siblings is not None:
                await state.siblings.stop()
            await asyncio.gather(*beside, reload.stop(), shadows.close(), return_exceptions=True)
            upstream.close()
            if shared is not None:
                await shared.close()


async def _until_stopped(state: GatewayState, listener: socket.socket, ready: Callable[[str], None] | None) -> int:
    config = state.config
    app: Any = AuditLog(GatewayApp(state), lambda: state.audit)
    app = RequestLog(app, state.lines) if config.log_requests else app
    if config.traces is not None:
        app = RequestTraces(app, config.traces.ratio(REQUEST_RATIO))
    settings = uvicorn.Config(
        app, http=_protocol(config, state.connections), log_level="critical", access_log=False,
        lifespan="off", loop="asyncio", backlog=BACKLOG, timeout_graceful_shutdown=5, server_header=False, date_header=False, timeout_keep_alive=75, ws="none",
        proxy_headers=bool(config.trusted_proxies), forwarded_allow_ips=list(config.trusted_proxies),
    )  # fmt: skip
    settings.load()
    settings.ssl = None if state.tls is None else state.tls.context
    server = HttpServer(settings)
    _relieve_collector()
    stop, stop_now = stop_events()
    serving = asyncio.create_task(server.serve([listener]))
    hurry = asyncio.create_task(stop_now.wait())
    is_first = state.siblings is None or state.siblings.place.announces
    address = _announce(state, listener) if is_first else ""
    drained = asyncio.create_task(_drain(state, stop))
    keeping = asyncio.create_task(state.servers.keep(None if ready is None else functools.partial(ready, address)), name="servers")
    try:
        with _target(config, listener) if is_first and config.targets_folder else contextlib.nullcontext():
            await asyncio.wait({drained, hurry, serving, keeping}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()
        is_drained = drained.done() and drained.result()
        left = state.open_requests
        state.lines.close()
        state.say("stopped" if is_drained else f"stopped; {left} requests were cut off")
        return 0 if is_drained else 1
    finally:
        for task in (drained, hurry, keeping):
            task.cancel()
        await asyncio.gather(drained, hurry, keeping, return_exceptions=True)
        server.should_exit, server.force_exit = True, state.open_requests > 0
        await serving


def _target(config: GatewayConfig, listener: socket.socket) -> contextlib.AbstractContextManager[object]:
    """Names the gateway in the targets folder."""
    address = listener.getsockname()
    return announced(config.targets_folder, f"gateway-{host_of(address)}-{address[1]}", address, {"job": "gateway"}, tls=config.tls.is_on)


def _relieve_collector() -> None:
    """Takes all that is there for good out of the garbage collector's sight, and lets it look less often: what a request leaves behind is freed by reference
    counts, and each look costs about as much as several requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTED_AT, _OLDER_AFTER, _OLDER_AFTER)


def _reload_on_hangup(state: GatewayState) -> None:
    """Reads the settings again after SIGHUP."""
    running: set[asyncio.Task[None]] = set()

    async def again() -> None:
        outcome: dict[str, Any] = {}
        try:
            outcome["changed"] = await state.reload()
        except UserError as error:
            outcome["refused"] = str(error)
            state.say(f"the settings stay as they were: {error}")
        if state.audit is not None:
            state.audit.act("reload", "SIGHUP", **outcome)

    def on_signal() -> None:
        task = asyncio.create_task(again(), name="reload")
        running.add(task)
        task.add_done_callback(running.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_signal)
    # A worker's waits until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def _announce(state: GatewayState, listener: socket.socket) -> str:
    """Says where the gateway is; returns its address."""
    address = listener.getsockname()
    host = host_of(address)
    if not (state.config.keys_file or state.config.oidc.issuer) and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        state.say(f"warning: anyone who reaches {host} may use this gateway; set keys_file or oidc, or leave out --host")
    ready = sum(backend.is_ready for backend in state.pool.backends)
    models = ", ".join(state.routes.models) or "no model yet"
    if state.config.audit_prompts:
        say(f"warning: the audit log '{state.config.audit_log}' gets the prompts of all clients (audit_prompts)")
    scheme = "http" if state.tls is None else "https"
    if state.tls is not None and (warning := expiry_warning(TlsFiles.of(state.config.tls))):
        state.say(f"warning: {warning}")
    state.say(f"gateway at {scheme}://{host}:{address[1]} ({ready} of {len(state.pool.backends)} backends ready: {models}); Ctrl-C stops it")
    return f"{scheme}://{host}:{address[1]}"


async def _drain(state: GatewayState, stop: asyncio.Event) -> bool:
    """After ``stop``, waits until no request is in flight; returns whether that is so within ``drain_s``."""
    await stop.wait()
    state.is_draining = True
    if state.open_requests:
        state.say(f"draining: {state.open_requests} requests are in flight; a second signal cuts them off")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(state.config.drain_s):
                while state.open_requests:
                    await asyncio.sleep(0.05)
    return not state.open_requests
