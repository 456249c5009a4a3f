"""The administration's API: the state of the gateway, and what an administrator does with its backends."""

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

import tandem
from tandem.config.gateway import LimitConfig
from tandem.gateway.audit import AUDIT, Entry
from tandem.gateway.backend import Backend
from tandem.gateway.keys import KeyRecord
from tandem.gateway.rate_limit import EmbeddedLimits, shares_of
from tandem.gateway.servers.group import Group
from tandem.gateway.siblings import joined_backend, joined_state
from tandem.gateway.workers import settings_were_read
from tandem.serving.bodies import read_body
from tandem.serving.errors import ApiError, internal, invalid, wrong_method
from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.gateway.app import GatewayState

ADMIN = "/admin/api/"
"""The beginning of its paths: GET ``state``, POST ``drain``, ``undrain``, ``update`` and ``reload``."""
_MOST_BYTES = 2**16
_LONGEST = 100
_BODY_S = 10.0


async def answer_admin(state: "GatewayState", scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request of an administrator."""
    try:
        response = JSONResponse(await _answer(state, scope, receive))
    except ApiError as error:
        response = JSONResponse(error.body, error.status, headers=error.headers)
    response.headers["Cache-Control"] = "no-store"
    await response(scope, receive, send)


async def _answer(state: "GatewayState", scope: Scope, receive: Receive) -> dict[str, Any]:
    """Raises ``ApiError``."""
    client = scope["client"][0] if scope.get("client") else ""
    action, method = scope["path"].removeprefix(ADMIN), scope["method"]
    entry: Entry | None = scope.get(AUDIT)
    noted = {} if entry is None else entry.administration
    if method != "GET":
        noted["action"] = action[:_LONGEST]
    who = state.auth.administrator(scope["headers"], client, entry, changes=method != "GET")
    if (method, action) == ("GET", "state"):
        own, others = state_of(state, time.time()), await _ask(state, "state")
        return joined_state(own, list(others.values())) if others else own
    if method == "POST" and action in ("drain", "undrain"):
        backend = _backend(state, await _body(state, receive, client))
        noted["backend"] = backend.name
        state.lines.add(f"{who} {action}s backend {backend.name}")
        return joined_backend([_turned(state, backend, action), *(await _ask(state, action, backend.name)).values()])
    if (method, action) == ("POST", "update"):
        model, version = _named_version(await _body(state, receive, client))
        noted |= {"model": model[:_LONGEST], "version": version[:_LONGEST]}
        state.lines.add(f"{who} updates the servers of {model[:_LONGEST]} to {version[:_LONGEST]}")
        try:
            first, *_ = await state.servers.update(model, version)
            return _group_state(first)
        except UserError as error:
            raise invalid(str(error)) from None
    if (method, action) == ("POST", "reload"):
        await _body(state, receive, client)
        state.lines.add(f"{who} has the settings read again")
        try:
            noted["changed"] = await state.reload()
        except UserError as error:
            raise invalid(str(error)) from None
        if state.siblings is not None:
            settings_were_read()
        for number, told in (await _ask(state, "reload")).items():
            if "refused" in told:
                raise internal(f"worker {number} of this gateway stays with the settings before: {told['refused']}")
        return {"changed": noted["changed"]}
    if action in ("state", "drain", "undrain", "update", "reload"):
        raise wrong_method(scope["path"], "GET" if action == "state" else "POST")
    known = "GET state, POST drain, POST undrain, POST update, POST reload"
    raise ApiError(404, f"{method} {action[:_LONGEST]} is not answered by the administration; there is {known}", code="not_found")


async def act_for_sibling(state: "GatewayState", action: str, body: Any) -> Any:
    """Does what another worker of this gateway was asked for, and asks its siblings for."""
    if action == "metrics":
        return state.metrics.text(state.admission, state.servers).decode()
    if action in ("drain", "undrain"):
        backend = next((backend for backend in state.pool.backends if backend.name == body), None)
        return None if backend is None else _turned(state, backend, action)
    if action == "reload":
        try:
            return {"changed": await state.reload()}
        except UserError as error:
            return {"refused": str(error)}
    return state_of(state, time.time())


async def learn_drained(state: "GatewayState") -> None:
    """Has a worker that was started again know what administrators have drained."""
    for told in (await _ask(state, "state")).values():
        drained = {each["name"] for each in told["backends"] if each["is_drained"]}
        for backend in state.pool.backends:
            backend.is_drained = backend.is_drained or backend.name in drained


async def _ask(state: "GatewayState", action: str, body: Any = None) -> dict[int, Any]:
    """Returns what each other worker of this gateway answers; empty if it is the only process."""
    told = {} if state.siblings is None else await state.siblings.ask(action, body)
    return {number: answer for number, answer in told.items() if answer is not None}


def _turned(state: "GatewayState", backend: Backend, action: str) -> dict[str, Any]:
    """Drains or undrains ``backend`` in this process; returns its state."""
    backend.is_drained = action == "drain"
    state.admission.wake()
    return _backend_state(backend)


async def _body(state: "GatewayState", receive: Receive, client: str) -> Any:
    with state.bodies.of(client) as share:
        body = await read_body(receive, share, _MOST_BYTES, _BODY_S)
    try:
        content = json.loads(body or b"")
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise invalid('the body is no JSON object; send {"backend": NAME}, or {} to read the settings again')
    return content


def _backend(state: "GatewayState", body: Any) -> Backend:
    """Returns the backend that a request names. Raises ``ApiError`` if there is none."""
    name = body.get("backend") if isinstance(body, dict) else None
    backend = next((backend for backend in state.pool.backends if backend.name == name), None)
    if backend is None:
        names = ", ".join(backend.name for backend in state.pool.backends)
        raise ApiError(404, f"there is no backend {json.dumps(name)[:_LONGEST]}; there is {names}", param="backend", code="backend_not_found")
    return backend


def _named_version(body: Any) -> tuple[str, str]:
    """Returns the model and the version of its servers that a request names. Raises ``ApiError``."""
    named = [body.get(key) for key in ("model", "version")] if isinstance(body, dict) else []
    given = [each for each in named if isinstance(each, str) and each and each.isprintable()]
    if len(given) < 2:
        raise invalid('an update is asked for with {"model": NAME, "version": "models/NAME/3" or a folder}')
    return given[0], given[1]


def state_of(state: "GatewayState", now: float) -> dict[str, Any]:
    """Returns what the page of the administration shows; ``now``: seconds since the epoch. It has neither keys nor their digests."""
    config, keys = state.config, state.auth.records
    limits = [(f"tenant {name}", tenant.limits) for name, tenant in config.tenants.items()]
    limits += [(f"tenant {name} model {model}", each) for name, tenant in config.tenants.items() for model, each in tenant.models.items()]
    limits += [(f"model {name}", each) for name, each in config.model_limits.items()]
    limits += [(f"key {record.id}", record.limits) for record in (keys or {}).values()]
    return {
        "version": tandem.__version__, "started": state.created, "is_draining": state.is_draining, "open_requests": state.open_requests,
        "balance": config.balance, "backends": [_backend_state(backend) for backend in state.pool.backends],
        "servers": [_group_state(group) for group in state.servers.groups],
        "queue": {
            "waiting": {model: count for model, count in state.admission.waiting.items() if count}, "oldest_s": state.admission.oldest_s,
            "max_waiting": config.queue.max_waiting, "max_wait_s": config.queue.max_wait_s,
        },
        "keys": None if keys is None else [_key_state(record, now) for record in keys.values()],
        "limits": [limit for who, each in limits for limit in _limits_state(state, who, each)],
    }  # fmt: skip


def _backend_state(backend: Backend) -> dict[str, Any]:
    return {
        "name": backend.name, "role": backend.role, "url": backend.config.url, "health": backend.health.value, "is_drained": backend.is_drained,
        "is_leaving": backend.is_leaving, "models": backend.models,
        "weight_version": backend.weights, "weight": backend.config.weight, "in_flight": len(backend.attempts), "max_requests": backend.config.max_requests,
        "outstanding_tokens": backend.outstanding_tokens, "breaker": backend.breaker.state, "restarts": backend.restarts,
    }  # fmt: skip


def _group_state(group: Group) -> dict[str, Any]:
    scale = group.config.scale
    decisions = [{"time": when, "from": before, "to": decision.count, "reason": decision.reason} for when, before, decision in reversed(group.decisions)]
    update = group.update
    return {
        "model": group.model, "role": group.config.role, "version": group.version.name, "weight_version": group.version.weights_text, "updates": group.outcomes,
        "update": None if update is None else {
            "from": update.before.name, "to": update.target.name, "began": update.began_s, "outcome": update.outcome, "reason": update.reason
        },
        "servers": [
            {
                "name": each.name, "version": each.version.name, "weight_version": each.version.weights_text, "is_leaving": each.is_leaving,
                "gpus": each.place.gpus, "cores": each.place.cores,
            }
            for each in group.servers
        ],
        "path": group.config.model, "wanted": group.desired, "min_count": scale.min_count if scale.max_count else group.desired,
        "max_count": scale.max_count or group.desired, **group.states, "restarts": group.restarts, "last_death": group.last_death, "decisions": decisions,
    }  # fmt: skip


def _key_state(record: KeyRecord, now: float) -> dict[str, Any]:
    return {
        "id": record.id, "tenant": record.tenant, "role": record.role, "models": record.models, "created": record.created, "expires": record.expires,
        "is_expired": record.is_expired(now), "limits": {name: value for name, value in asdict(record.limits).items() if value is not None},
    }  # fmt: skip


def _limits_state(state: "GatewayState", who: str, limits: LimitConfig) -> list[dict[str, Any]]:
    """Returns the limits of ``who`` with what is used of them, ``None`` where gateways count together."""
    shares = shares_of(who, limits, 0)
    used = state.limits.used(shares) if isinstance(state.limits, EmbeddedLimits) else [None] * len(shares)
    return [
        {"who": who, "limit": share.name.rpartition(":")[2], "most": share.limit, "used": count} for share, count in zip(shares, used, strict=True)
    ]
