"""What the workers of one gateway tell each other, over Unix sockets in a folder that is theirs alone."""

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tandem.gateway.bounded_body import read_bounded
from tandem.serving.http_process import HttpServer

_LIMIT_S, _QUICK_S = 30.0, 5.0
"""For a sibling that reads the settings again and probes new backends, and for what it answers at once."""
_MOST_BYTES = 2**26
_HEALTH = ("unknown", "ready", "not_ready", "down")
_BREAKERS = ("closed", "half_open", "open")
"""From the best to the worst: of several processes the worst is shown."""
_FAMILY = re.compile(r"# HELP (\S+) ")


@dataclass(frozen=True)
class Place:
    """Which worker a process is. ``folder``: where the workers' sockets are. ``announces``: it says for all that the gateway serves."""

    folder: Path
    number: int
    count: int
    announces: bool

    def socket_of(self, number: int) -> str:
        return str(self.folder / f"worker-{number}.sock")


Act = Callable[[str, Any], Awaitable[Any]]
"""Does what another worker asks for, by the name of the action and its body; returns an object or a text."""


class Siblings:
    """The other workers. ``act``: does here what one of them asks for."""

    def __init__(self, place: Place, act: Act) -> None:
        self.place, self._act = place, act
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to answer the others."""
        path = Path(self.place.socket_of(self.place.number))
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        self._server = HttpServer(uvicorn.Config(
            self._answer, interface="asgi3", log_level="critical", access_log=False, lifespan="off", loop="asyncio", ws="none", proxy_headers=False,
            timeout_graceful_shutdown=1,
        ))  # fmt: skip
        self._serving = asyncio.create_task(self._server.serve([listener]))

    async def stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def ask(self, action: str, body: Any = None) -> dict[int, Any]:
        """Has all other workers do ``action``; returns what each answers, ``None`` for one that does not (it is being started)."""
        others = [number for number in range(self.place.count) if number != self.place.number]
        return dict(zip(others, await asyncio.gather(*(self._ask(number, action, body) for number in others)), strict=True))

    async def _ask(self, number: int, action: str, body: Any) -> Any:
        try:
            connector = aiohttp.UnixConnector(self.place.socket_of(number))
            async with (
                asyncio.timeout(_LIMIT_S if action == "reload" else _QUICK_S), aiohttp.ClientSession(connector=connector) as session,
                session.post(f"http://worker/{action}", json=body) as response,
            ):  # fmt: skip
                return json.loads(await read_bounded(response, _MOST_BYTES)) if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        answer: Response = JSONResponse(await self._act(scope["path"].removeprefix("/"), json.loads(body or b"null")))
        await answer(scope, receive, send)


def joined_state(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the state of the gateway, as of ``admin.state_of``, of those of its workers: sums of what they have, and the worst of what they see."""
    states = [own, *others]
    waiting: dict[str, int] = {}
    for state in states:
        for model, count in state["queue"]["waiting"].items():
            waiting[model] = waiting.get(model, 0) + count
    queue = {
        **own["queue"], "waiting": waiting, "oldest_s": max(state["queue"]["oldest_s"] for state in states),
        "max_waiting": sum(state["queue"]["max_waiting"] for state in states),
    }  # fmt: skip
    return {
        **own, "queue": queue, "started": min(state["started"] for state in states), "is_draining": any(state["is_draining"] for state in states),
        "open_requests": sum(state["open_requests"] for state in states),
        "backends": [joined_backend([backend, *_named(backend["name"], others)]) for backend in own["backends"]],
    }  # fmt: skip


def joined_backend(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the state of a backend of those that the workers have of it."""
    return {
        **views[0], **{name: sum(view[name] for view in views) for name in ("in_flight", "max_requests", "outstanding_tokens")},
        "restarts": max(view["restarts"] for view in views), "is_drained": any(view["is_drained"] for view in views),
        "health": max((view["health"] for view in views), key=_HEALTH.index), "breaker": max((view["breaker"] for view in views), key=_BREAKERS.index),
    }  # fmt: skip


def _named(name: str, states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [backend for state in states for backend in state["backends"] if backend["name"] == name]


def joined_metrics(texts: Mapping[int, str | None]) -> bytes:
    """Returns the figures of all workers in Prometheus' text format, each with the label ``worker``: sums are then right also when one was started anew, whose
    counters begin at 0. ``texts``: those of each, ``None`` of one that does not answer."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in texts.items():
        family = ""
        for line in (text or "").splitlines():
            found = _FAMILY.match(line)
            if found:
                family = found.group(1)
                samples.setdefault(family, [])
                heads[family] = []
            (heads if line.startswith("#") else samples)[family].append(line if line.startswith("#") else _labelled(line, number))
    parts = [line for family, head in heads.items() for line in (*head, *samples[family])]
    parts += ["# HELP tandem_gateway_worker_up 1 if the worker answers.", "# TYPE tandem_gateway_worker_up gauge"]
    parts += [f'tandem_gateway_worker_up{{worker="{number}"}} {float(text is not None)}' for number, text in sorted(texts.items())]
    return ("\n".join(parts) + "\n").encode()


def _labelled(sample: str, number: int) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{worker="{number}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{worker="{number}"}} {value}'
