"""The life of a server: take the port, load the model, serve, drain, stop."""

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from tandem.engine.model_limits import check_folder as check_folder_of_model
from tandem.model.huggingface.generation_config import default_sampling
from tandem.model.huggingface.pooling_config import read_pooling
from tandem.runtime.exposition.sent_spans import SentSpans
from tandem.runtime.exposition.targets import announced, check_folder
from tandem.runtime.machine.heap import give_back_large_memory, use_one_arena
from tandem.runtime.process.tasks import end_tasks
from tandem.runtime.rpc.client_connections import ClientConnections
from tandem.runtime.rpc.listener import listen
from tandem.runtime.rpc.patient_protocol import PatientProtocol
from tandem.runtime.tls import ServerTls, check_tls, expiry_warning
from tandem.runtime.traces.exporter import check_traces, exporting
from tandem.runtime.traces.spans import SPANS
from tandem.serving.app import make_app
from tandem.serving.bodies import UnfinishedBodies
from tandem.serving.engines.pool import Pool
from tandem.serving.errors import ApiError, overloaded
from tandem.serving.follow import follow
from tandem.serving.followed_certificate import follow_files
from tandem.serving.http_process import BACKLOG, HttpServer, host_of, max_connections, raise_file_limit, say, stop_events
from tandem.serving.kv_transfer.transfers import KVTransfers
from tandem.serving.limits import BEFORE_LOAD_BYTES
from tandem.serving.log_lines import log_http, log_stats, setup_beside_terminal
from tandem.serving.memory import freeze_start
from tandem.serving.metrics import Metrics
from tandem.serving.refusal import answer
from tandem.serving.routes.adapters import ServedAdapters
from tandem.serving.settings import ServerSettings
from tandem.serving.state import ServerState
from tandem.serving.text_encoder import TextEncoder
from tandem.text.chat import ChatTemplate
from tandem.text.tokenizer import Tokenizer


def run_server(settings: ServerSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status. Raises ``UserError`` before any work where the settings, the
    model or the port cannot be used."""
    settings.check()
    if settings.targets_folder:
        check_folder(settings.targets_folder)
    if settings.tls is not None:
        check_tls(settings.tls)
    check_traces(settings.traces)
    use_one_arena()
    # Texts are encoded in this process's own threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_folder(settings.tokenizer_folder)
    check_folder_of_model(settings.engine, tokenizer)
    defaults = default_sampling(Path(settings.engine.model), settings.engine.generation_config, settings.engine.override_generation_config)
    pooling = read_pooling(Path(settings.engine.model), settings.engine)
    if settings.chat_template is not None:
        ChatTemplate.from_folder(settings.tokenizer_folder, source=settings.chat_template)
    listener = listen(settings.host, settings.port, backlog=BACKLOG)
    raise_file_limit()
    metrics = Metrics(settings.names[0], settings.instances)
    pool = Pool(settings, metrics)
    bodies = UnfinishedBodies(BEFORE_LOAD_BYTES * 64, BEFORE_LOAD_BYTES * 16)
    transfers = KVTransfers(settings.kv_transfer, pool, metrics, say)
    state = ServerState(
        settings, pool, metrics, tokenizer, ServedAdapters(pool, settings.names), TextEncoder(tokenizer), bodies, transfers, defaults, pooling
    )
    SPANS.identify("server")
    if settings.log_folder:
        setup_beside_terminal("server", settings.log_folder, f"server-{listener.getsockname()[1]}")
    if settings.traces is not None:
        metrics.registry.register(SentSpans())
    give_back_large_memory()
    with listener, _announced(settings, listener), exporting(settings.traces):
        return asyncio.run(_serve(state, listener))


def _announced(settings: ServerSettings, listener: socket.socket) -> contextlib.AbstractContextManager[object]:
    """Names the server in the targets folder, if there is one."""
    if not settings.targets_folder:
        return contextlib.nullcontext()
    address = listener.getsockname()
    identity = f"server-{host_of(address)}-{address[1]}"
    return announced(settings.targets_folder, identity, address, {"job": "server"}, tls=settings.tls is not None, path=settings.root_path)


async def _serve(state: ServerState, listener: socket.socket) -> int:
    settings = state.settings
    connections = ClientConnections(max_connections(), settings.connections_per_client)
    deadlines = {"request_s": settings.request_s, "stall_s": settings.stall_s}
    protocol = type("Protocol", (PatientProtocol,), {**deadlines, "connections_of_clients": connections, "refusal": staticmethod(_too_many_connections)})
    config = uvicorn.Config(
        make_app(state), http=protocol, log_config=None, log_level=settings.http_log_level, access_log=False, lifespan="off", loop="asyncio", backlog=BACKLOG,
        timeout_graceful_shutdown=5, server_header=False, timeout_keep_alive=30,
    )  # fmt: skip
    log_http(state.lines)
    config.load()
    tls = None if settings.tls is None else ServerTls(settings.tls)
    config.ssl = None if tls is None else tls.context
    server = HttpServer(config)
    stop, stop_now = stop_events()
    serving = asyncio.create_task(server.serve([listener]))
    life = asyncio.create_task(_life(state, stop, listener.getsockname()))
    hurry = asyncio.create_task(stop_now.wait())
    stats = asyncio.create_task(log_stats(state.metrics, state.lines)) if settings.log_stats else None
    refresh = None if settings.tls is None or tls is None or not settings.follows_tls else asyncio.create_task(follow_files(tls, settings.tls, say))
    try:
        await asyncio.wait({life, hurry, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not life.done():
            state.lines.close()
            say("stopped at once; in-flight requests were cut off")
            return 1
        return life.result()
    finally:
        await end_tasks(task for task in (life, hurry, stats, refresh) if task is not None)
        server.should_exit = True
        server.force_exit = stop_now.is_set()
        await state.kv_transfers.stop()
        await state.pool.stop()
        await serving


async def _life(state: ServerState, stop: asyncio.Event, address: tuple[Any, ...]) -> int:
    """Load, be ready, and drain after ``stop``."""
    settings = state.settings
    url = f"{'http' if settings.tls is None else 'https'}://{host_of(address)}:{address[1]}{settings.root_path}"
    if not settings.api_keys and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        say(f"warning: anyone who reaches {host_of(address)} may use this server; give --api-key @FILE, or leave out --host")
    if settings.tls is not None:
        if settings.tls.client_ca_file and settings.tls.client_certificates == ssl.CERT_NONE:
            say("warning: --ssl-ca-certs has no effect with --ssl-cert-reqs 0; clients need a certificate with 2")
        if warning := expiry_warning(settings.tls):
            say(f"warning: {warning}")
    say(f"loading '{settings.engine.model}'; {url} answers probes meanwhile")
    loading = asyncio.create_task(_load(state))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        say("stopped before the model was loaded")
        return 0
    loading.result()
    if state.sampling_defaults:
        given = ", ".join(f"{name} {value:g}" for name, value in state.sampling_defaults.items())
        say(f"requests that do not say otherwise are sampled with {given} (--generation-config vllm: with vLLM's defaults)")
    freeze_start()
    state.is_started = True
    engines = "1 engine" if settings.instances == 1 else f"{settings.instances} engines"
    names = ", ".join((*settings.names, *state.adapters.names))
    say(f"serving {names} at {url} ({engines}, {state.max_model_len} tokens of context); Ctrl-C stops it")
    following = None if settings.follows is None else asyncio.create_task(follow(state.pool, settings.follows, say))
    await stopping
    if following is not None:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    state.is_draining = True
    if state.open_requests:
        say(f"draining: {state.open_requests} requests are in flight; a second signal cuts them off")
        if state.pool.is_paused:
            # Otherwise the clients of paused requests would wait forever.
            with contextlib.suppress(ApiError):  # A hung engine has no requests.
                await state.pool.resume()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_s):
                while state.open_requests:
                    await asyncio.sleep(0.05)
    left = state.open_requests
    state.lines.close()
    say("stopped" if not left else f"stopped after {settings.drain_s:g} s; {left} requests were cut off")
    return 0 if not left else 1


async def _load(state: ServerState) -> None:
    """Every engine, and the adapters that are served from the start."""
    await state.pool.start()
    for name, folder in state.settings.adapters:
        await state.adapters.load(name, folder)
    await state.kv_transfers.start()


async def _too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(overloaded("your address has too many open connections; close some, or raise --max-connections-per-client"), send, receive)
