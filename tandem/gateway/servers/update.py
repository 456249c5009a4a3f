"""A rolling update: the servers of a model take another version one after the other, and go back to the one before if a server does not.

A server is given nothing new before it changes or ends, and finishes what it has: a stream ends with the weights that it began with. A server that starts with
the version gets requests after it has answered one. So no request fails, whether the update does or not.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import aiohttp

from tandem.config.servers import flag_name
from tandem.gateway.backend import Health
from tandem.gateway.servers.server import Server
from tandem.gateway.servers.versions import ModelVersion, have_equal_descriptions
from tandem.types import RunError

if TYPE_CHECKING:
    from tandem.gateway.servers.group import Group

Method = Literal["in_place", "surge", "stop_first"]
Outcome = Literal["runs", "goes_back", "done", "failed", "stuck"]
_LOOK_S = 0.02
_LONGEST = 400
_NOT_IN_PLACE = ("quantization", "speculative_config", "lora_modules", "enable_lora")
"""Flags with which an engine holds more than the weights of its folder."""


class UpdateFailed(RunError):
    """A server did not take the version. The text says why."""


@dataclass
class UpdateState:
    """An update as it is shown. ``outcome``: ``failed``: all servers are back at the version before; ``stuck``: they are not. ``began_s``: unix seconds."""

    before: ModelVersion
    target: ModelVersion
    began_s: float
    outcome: Outcome = "runs"
    reason: str = ""

    @property
    def is_over(self) -> bool:
        return self.outcome not in ("runs", "goes_back")


class _Answer(NamedTuple):
    status: int
    weights: str | None
    text: str


def choose_method(wanted: str, *, are_equal: bool, others_ready: int, has_room: bool) -> Method:
    """Returns how a server gets another version. In place where only weights differ (``are_equal``) and others serve meanwhile, or it is ``wanted``; else
    a new server is started before the old one ends, if it ``has_room`` for its GPUs, or after."""
    if are_equal and (wanted == "in_place" or (wanted == "auto" and others_ready > 0)):
        return "in_place"
    return "surge" if has_room else "stop_first"


class RollingUpdate:
    """Brings versions to the servers of ``groups``, all of one model. ``session``: for calls to them."""

    def __init__(self, groups: "Sequence[Group]", session: aiohttp.ClientSession, say: Callable[[str], None]) -> None:
        self._groups, self._model, self._session, self._say = groups, groups[0].model, session, say

    async def run(self, state: UpdateState) -> None:
        """Brings ``state.target`` to all servers, one at a time; brings them back to ``state.before`` if one does not take it."""
        model, before, target = self._model, state.before, state.target
        self._say(f"servers of {model}: update from {before.name} to {target.name} (weights {target.weights_text})")
        try:
            for group in self._groups:
                await self._replace_all(group, target)
                # What is started from now on begins with it; what was started meanwhile did not.
                group.use(target)
                await self._replace_all(group, target)
            state.outcome = "done"
            self._say(f"servers of {model} serve {target.name}")
            return
        except (UpdateFailed, OSError) as error:
            state.outcome, state.reason = "goes_back", str(error)
            self._say(f"servers of {model}: {target.name} is given up, back to {before.name}: {error}")
        for group in self._groups:
            group.use(before)
        try:
            for group in self._groups:
                await self._replace_all(group, before)
            state.outcome = "failed"
        except (UpdateFailed, OSError) as error:
            state.outcome, state.reason = "stuck", f"{state.reason}; on the way back: {error}"
            self._say(f"servers of {model}: not all are back at {before.name}: {error}")

    async def _replace_all(self, group: "Group", version: ModelVersion) -> None:
        """Raises ``UpdateFailed``, and ``OSError`` if no process can be started or a folder cannot be read."""
        while others := [server for server in group.staying if server.version != version]:
            old = min(others, key=lambda server: not server.was_ready)
            method = await self._method(group, old, version)
            self._say(f"server {old.name} of {old.version.name}: {version.name} by {method}")
            await {"in_place": self._in_place, "surge": self._surge, "stop_first": self._stop_first}[method](group, old, version)

    async def _method(self, group: "Group", old: Server, version: ModelVersion) -> Method:
        # Servers of every role answer whole requests while no other can.
        others_ready = sum(server is not old for each in self._groups for server in each.ready)
        is_plain = old.was_ready and not any(flag_name(key) in _NOT_IN_PLACE for key in group.config.flags)
        are_equal = is_plain and await asyncio.to_thread(have_equal_descriptions, old.version.path, version.path)
        return choose_method(group.config.update.method, are_equal=are_equal, others_ready=others_ready, has_room=group.has_room())

    async def _in_place(self, group: "Group", server: Server, version: ModelVersion) -> None:
        """Takes a server out, lets it finish what it has, and has its engine load the weights. Raises ``UpdateFailed``; it serves what it served then."""
        backend = server.backend
        if backend is None:  # It has died; another one is started.
            return
        backend.is_leaving = True
        try:
            await _until(lambda: not backend.attempts or server.backend is None)
            await self._control(server, "/start_weight_update", {"version": list(version.weights)})
            await self._control(server, "/update_weights", {"update_info": {"folder": version.path}})
            await self._control(server, "/finish_weight_update", None)
            server.version, backend.weights = version, version.weights_text
            await self._check_answer(server)
        finally:
            backend.is_leaving = server.is_leaving
        await self._settle(group, server)

    async def _surge(self, group: "Group", old: Server, version: ModelVersion) -> None:
        """Starts a server beside ``old``, which gives way when the new one answers. Raises ``UpdateFailed``; ``old`` serves on then."""
        new = group.start_candidate(version, old)
        await self._make_member(group, new)
        group.let_go(old)
        await self._settle(group, new)

    async def _stop_first(self, group: "Group", old: Server, version: ModelVersion) -> None:
        """Lets ``old`` finish and end, and starts a server on its GPUs. Raises ``UpdateFailed``; the group starts one of its own version then."""
        group.held_back += 1
        try:
            group.let_go(old)
            await _until(lambda: old not in group.servers)
            new = group.start_candidate(version, old)
            await self._make_member(group, new)
        finally:
            group.held_back -= 1
        await self._settle(group, new)

    async def _make_member(self, group: "Group", new: Server) -> None:
        """Waits until ``new`` is ready and answers a request; then it is one of the group's. Raises ``UpdateFailed``, after which it ends."""
        try:
            await _until(lambda: new.was_ready or new not in group.servers)
            if new not in group.servers:
                raise UpdateFailed(f"server {new.name} was not ready: {new.why}")
            await self._check_answer(new)
        except BaseException:
            group.let_go(new)
            raise
        new.is_candidate = False
        if new.backend is not None:
            new.backend.is_leaving = False

    async def _settle(self, group: "Group", server: Server) -> None:
        """Watches a server that takes requests again for ``settle_s``. Raises ``UpdateFailed`` if it dies, fails its probes or its requests."""
        ends = time.monotonic() + group.config.update.settle_s
        while time.monotonic() < ends and not server.is_leaving:
            backend = server.backend
            if backend is None or server.process.poll() is not None:
                raise UpdateFailed(f"server {server.name} died after it had taken the version: {server.last_words}")
            if backend.health is not Health.READY or not backend.breaker.is_closed:
                raise UpdateFailed(f"server {server.name} {'fails requests' if backend.health is Health.READY else 'is not ready any more'}")
            await asyncio.sleep(_LOOK_S)

    async def _check_answer(self, server: Server) -> None:
        """Asks for one token. Raises ``UpdateFailed`` if the server fails, or answers with other weights than it should."""
        body = {"model": self._model, "prompt": "x", "max_tokens": 1}
        answer = await self._post(server, server.api_key, "/v1/completions", body)
        if answer.status >= 500:
            raise UpdateFailed(f"server {server.name} answers a request with {answer.status}: {answer.text}")
        if answer.weights not in (None, server.version.weights_text):
            raise UpdateFailed(f"server {server.name} answers with weights {answer.weights} instead of {server.version.weights_text}")

    async def _control(self, server: Server, path: str, body: Any) -> None:
        answer = await self._post(server, server.control_key, path, body)
        if answer.status != 200:
            raise UpdateFailed(f"server {server.name} refuses {path}: {answer.text}")

    async def _post(self, server: Server, key: str, path: str, body: Any) -> _Answer:
        """Raises ``UpdateFailed`` if the server does not answer within ``start_s``."""
        if server.backend is None:
            raise UpdateFailed(f"server {server.name} died: {server.last_words}")
        url, headers = server.backend.config.url + path, {"Authorization": f"Bearer {key}", **({} if body is None else {"Content-Type": "application/json"})}
        try:
            async with asyncio.timeout(max(group.config.start_s for group in self._groups)), self._session.post(url, json=body, headers=headers) as response:
                text = await response.text(errors="replace")
                return _Answer(response.status, response.headers.get("X-Tandem-Weight-Version"), _message(text))
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise UpdateFailed(f"server {server.name} does not answer {path}: {type(error).__name__}") from None


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:_LONGEST]
    except (ValueError, KeyError, TypeError):
        return text[:_LONGEST]


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(_LOOK_S)
