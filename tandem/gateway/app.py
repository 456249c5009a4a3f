"""The gateway's HTTP application: pages, probes, the list of models, and everything that goes to a backend."""

import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

import tandem
from tandem.config.gateway import GatewayConfig
from tandem.gateway.admin import ADMIN, answer_admin
from tandem.gateway.admission import Admission
from tandem.gateway.audit import AUDIT, AuditFile, Entry
from tandem.gateway.auth import Auth, Caller
from tandem.gateway.headers import Headers, first_values
from tandem.gateway.inference_request import INFERENCE_PATHS, InferenceRequest, for_model, read_request
from tandem.gateway.metrics import Metrics
from tandem.gateway.openapi import READ_PATHS, description
from tandem.gateway.pages import page
from tandem.gateway.pool import Pool
from tandem.gateway.proxy import Proxy
from tandem.gateway.rate_limit import EmbeddedLimits, Limits, Refusal, limit_headers, refused
from tandem.gateway.routing.model_routes import ModelRoutes
from tandem.gateway.routing.router import reads_prefix
from tandem.gateway.servers.servers import Servers
from tandem.gateway.siblings import Siblings, joined_metrics
from tandem.gateway.stored_responses import PATH
from tandem.gateway.traced import RequestTrace
from tandem.gateway.usage import Meter
from tandem.runtime.exposition.text import CONTENT_TYPE
from tandem.runtime.rpc.client_connections import ClientConnections
from tandem.runtime.rpc.patient_protocol import CONNECTION
from tandem.runtime.tls import ServerTls
from tandem.serving.bodies import Share, UnfinishedBodies, read_body, too_large
from tandem.serving.errors import ApiError, internal, invalid, unavailable, wrong_method
from tandem.serving.http_process import say
from tandem.serving.json_body import PARSED, BodyParser
from tandem.serving.log_lines import USAGE, LogLines
from tandem.serving.refusal import answer
from tandem.serving.traced import TRACE

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_JSON_HEADER = (b"content-type", b"application/json")


def new_id() -> str:
    """Returns a name that no other request has. It is no secret: a system call for each would be paid for nothing."""
    return f"{random.getrandbits(128):032x}"


async def _nothing_to_reload() -> list[str]:
    return []


@dataclass
class GatewayState:
    """What the requests of one gateway share. ``is_draining``: nothing new is taken."""

    config: GatewayConfig
    pool: Pool
    routes: ModelRoutes
    proxy: Proxy
    admission: Admission
    metrics: Metrics
    bodies: UnfinishedBodies
    auth: Auth
    connections: ClientConnections
    limits: Limits = field(default_factory=EmbeddedLimits)
    lines: LogLines = field(default_factory=LogLines)
    parser: BodyParser = field(default_factory=BodyParser)
    audit: AuditFile | None = None
    tls: ServerTls | None = None
    siblings: Siblings | None = None
    """The other processes of this gateway, if there are any."""
    reload: Callable[[], Awaitable[list[str]]] = _nothing_to_reload
    """Follows a change of the file of settings; returns the keys that have changed. Raises ``UserError``."""
    servers: Servers = field(default_factory=Servers)
    """Those that it has started."""
    say: Callable[[str], None] = say
    """Writes a line for the operator; that of a worker begins with its number."""
    is_draining: bool = False
    open_requests: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def why_not_ready(self) -> str | None:
        """A few words for the balancer in front, ``None`` while requests are welcome."""
        return "draining" if self.is_draining else None if self.pool.is_ready else "no backend is ready"


class GatewayApp:
    """ASGI application. It is no framework's: every request passes here, and none needs more than its path."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is started without lifespan and WebSockets"
        path, method = scope["path"], scope["method"]
        if path in INFERENCE_PATHS:
            await self._inference(scope, receive, send)
            return
        if path.startswith(ADMIN):
            await answer_admin(self._state, scope, receive, send)
            return
        if method in ("GET", "DELETE") and path.startswith(f"{PATH}/"):
            await self._stored(scope, receive, send)
            return
        if method not in ("GET", "HEAD"):
            if path in READ_PATHS or path.startswith("/v1/models/"):
                await answer(wrong_method(path, "GET", "HEAD"), send, receive)
                return
            known = ", ".join(INFERENCE_PATHS)
            await answer(ApiError(404, f"{method} {path[:100]} is not answered here; there is POST {known}", code="not_found"), send, receive)
            return
        try:
            response = page(path, scope["headers"]) or (await self._metrics() if path == "/metrics" else self._get(path))
        except ApiError as error:
            response = JSONResponse(error.body, error.status, headers=error.headers)
        await response(scope, receive, send)

    def _get(self, path: str) -> Response:
        """Returns the answer to a GET. Raises ``ApiError``."""
        state = self._state
        if path == "/liveness":
            return JSONResponse({"status": "alive"})
        if path in ("/readiness", "/health", "/startup"):
            why = state.why_not_ready
            return JSONResponse({"status": why or "ready"}, 503 if why else 200)
        if path == "/openapi.json":
            return JSONResponse(description())
        if path == "/version":
            return JSONResponse({"version": tandem.__version__})
        if path == "/v1/models":
            return JSONResponse({"object": "list", "data": [self._model(name) for name in state.routes.models]})
        if path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            state.routes.check_model(name)
            return JSONResponse(self._model(name))
        raise ApiError(404, f"GET {path[:100]} is not answered here; there is /v1/models, /readiness, /liveness, /metrics and /version", code="not_found")

    async def _metrics(self) -> Response:
        state, siblings = self._state, self._state.siblings
        text = state.metrics.text(state.admission, state.servers)
        if siblings is not None:
            text = joined_metrics({siblings.place.number: text.decode(), **await siblings.ask("metrics")})
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    def _model(self, name: str) -> dict[str, Any]:
        versions = self._state.pool.weight_versions(name)
        return {"id": name, "object": "model", "created": self._state.created, "owned_by": "tandem", **({"weight_versions": versions} if versions else {})}

    async def _inference(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        refusal: ApiError | None = None
        is_complete = False
        headers: Headers = scope["headers"]
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        id = given.decode("ascii") if given and _REQUEST_ID.fullmatch(given) else new_id()
        state.open_requests += 1
        try:
            client = scope["client"][0] if scope.get("client") else ""
            traced: RequestTrace | None = RequestTrace(scope[TRACE]) if TRACE in scope else None
            caller = state.auth.caller(headers, client)
            entry: Entry | None = scope.get(AUDIT)
            if entry is not None:
                entry.tenant, entry.key = caller.tenant, None if caller.key is None else caller.key.id
            if traced is not None:
                traced.part("auth")
                traced.span.update({"tandem.tenant": caller.tenant})
            with state.bodies.of(client) as share:
                try:
                    request = await self._read(id, scope, receive, share, caller.tenant)
                finally:
                    is_complete = share.is_complete
            if request is None:  # The client left.
                return
            if entry is not None:
                entry.request_id, entry.model, entry.stream = request.id, request.model, request.stream
            if traced is not None:
                traced.read(request)
            await self._admitted(request, caller, scope, send)
        except ApiError as error:
            # The traceback would keep the body.
            refusal = error.with_traceback(None)
        except Exception as error:
            state.lines.add(f"a request failed in the gateway: {type(error).__name__}: {error}")
            refusal = internal(f"the gateway failed: {type(error).__name__}")
        finally:
            state.open_requests -= 1
        if refusal is not None:
            if TRACE in scope:
                scope[TRACE].update({"error.type": str(refusal.code or refusal.kind), "error.message": refusal.message})
            await answer(refusal, send, None if is_complete or refusal.status == 408 else receive, scope["path"], id)

    async def _admitted(self, request: InferenceRequest, caller: Caller, scope: Scope, send: Send) -> None:
        """Answers a request within the limits of its caller. Raises ``ApiError``."""
        state = self._state
        caller.check_model(request.asked_model)
        state.routes.check_model(request.asked_model)
        state.pool.check_context(request)
        shares = caller.shares(request.tokens, request.asked_model, request.prompt_tokens)
        # The client chooses the request's id, and may choose one twice.
        reservation = new_id() if shares else ""
        left = await state.limits.reserve(reservation, shares) if shares else []
        if isinstance(left, Refusal):
            state.metrics.limited.labels(left.share.name.rpartition(":")[2]).inc()
            raise refused(left)
        meter = Meter(request.prompt_tokens)
        try:
            if request.previous_response:
                home = await state.proxy.stored.home(request.previous_response, caller.tenant, request.headers, request.client)
                # Without one, any backend says that it does not have it.
                request = request if home is None else replace(request, home=home.name)
            limited = limit_headers(shares, left, time.time()) if shares else []
            await state.proxy.answer(request, scope["state"][CONNECTION], send, meter, limited, scope.get(TRACE))
        finally:
            if shares:
                await state.limits.settle(reservation, shares, meter.tokens, int(meter.is_answered), meter.input_tokens)
            if TRACE in scope and meter.is_answered:
                scope[TRACE].update({"gen_ai.usage.input_tokens": meter.prompt, "gen_ai.usage.output_tokens": meter.output})
            if USAGE in scope and meter.is_answered:
                scope[USAGE].prompt, scope[USAGE].completion = meter.prompt, meter.output

    async def _stored(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers GET and DELETE of ``/v1/responses/ID``, which count as requests and cost no tokens."""
        state, headers = self._state, scope["headers"]
        client = scope["client"][0] if scope.get("client") else ""
        try:
            caller = state.auth.caller(headers, client)
            entry: Entry | None = scope.get(AUDIT)
            if entry is not None:
                entry.tenant, entry.key = caller.tenant, None if caller.key is None else caller.key.id
            reservation, shares = new_id(), caller.shares(0, None)
            left = await state.limits.reserve(reservation, shares)
            if isinstance(left, Refusal):
                state.metrics.limited.labels(left.share.name.rpartition(":")[2]).inc()
                raise refused(left)
            try:
                id = scope["path"].removeprefix(f"{PATH}/")
                response = await state.proxy.stored.answer(scope["method"], id, caller.tenant, headers, client)
            finally:
                await state.limits.settle(reservation, shares, 0, 1)
        except ApiError as error:
            response = JSONResponse(error.body, error.status, headers=error.headers)
        await response(scope, receive, send)

    async def _read(self, id: str, scope: Scope, receive: Receive, share: Share, tenant: str) -> InferenceRequest | None:
        """Returns the request with its body, ``None`` if the client left. Raises ``ApiError``."""
        state = self._state
        if scope["method"] != "POST":
            raise wrong_method(scope["path"], "POST")
        if state.is_draining:
            raise unavailable("the gateway is shutting down", retry_after_s=1)
        most = int(state.config.max_body_mib * 2**20)
        headers: Headers = scope["headers"]
        first = first_values(headers)
        if int(first.get(b"content-length", b"0")) > most:
            # It says so itself: nothing of it is received.
            raise too_large(most)
        # Nothing has to be waited for where all of it came with the head, as it mostly does.
        limit_s = None if scope["state"][CONNECTION].has_body else state.config.request_s
        body = await read_body(receive, share, most, limit_s)
        if body is None:
            return None
        if not body:
            raise invalid("the body is empty; send a JSON object")
        # A body is JSON here whatever its Content-Type says, as clients of OpenAI's API do not always say.
        parsed: dict[str, Any] = {"headers": [_JSON_HEADER]}
        await state.parser.parse(parsed, body, None)
        if AUDIT in scope and state.config.audit_prompts:
            scope[AUDIT].body = parsed[PARSED]
        return self._routed(read_request(
            id, scope["path"], scope["query_string"], headers, body, parsed[PARSED], share.client, tenant=tenant, by_prefix=reads_prefix(state.config)
        ), parsed[PARSED])  # fmt: skip

    def _routed(self, request: InferenceRequest, content: Any) -> InferenceRequest:
        """Returns ``request`` for the model of its route, with the copies for those in the shadow."""
        by_prefix = reads_prefix(self._state.config)
        model, weights = self._state.routes.version_of(request.model)
        if weights:
            # Keys and limits go by the model, whichever of its versions is asked for.
            request = replace(for_model(request, content, model, by_prefix=by_prefix), weights=weights, asked_model=model)
        routed = self._state.routes.route(request.model, request.session)
        shadows = [for_model(request, content, model, by_prefix=by_prefix) for model in routed.shadows]
        copies = tuple(replace(copy, id=f"{copy.id}-shadow-{number}") for number, copy in enumerate(shadows))
        return replace(for_model(request, content, routed.model, by_prefix=by_prefix), shadows=copies) if copies or routed.model != request.model else request
