"""Who may go to a backend now, who waits, and who is refused because he would wait too long."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.config.gateway import GatewayConfig
from tandem.gateway.fair_queue import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairQueue
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.pool import Pool
from tandem.serving.errors import ApiError

_MOST_RETRY_AFTER_S = 600
_RATE_WINDOW_S = 10.0


@dataclass(eq=False)
class _Waiter:
    turn: "asyncio.Future[None]"
    since: float
    request: InferenceRequest


@dataclass
class _Line:
    """The requests for one model. ``granted``: those that have their turn and have not taken it yet. ``ended``: when the last ones ended, for the rate."""

    queue: FairQueue[_Waiter]
    granted: list[InferenceRequest] = field(default_factory=list)
    ended: "deque[float]" = field(default_factory=lambda: deque(maxlen=1000))


class Admission:
    """Lets at most as many requests through as the backends of their model have room for; the others wait, fairly among tenants.

    ``clock``: monotonic seconds."""

    def __init__(self, config: GatewayConfig, pool: Pool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._clock = pool, clock
        self._lines: dict[str | None, _Line] = {}
        self.follow(config)

    def follow(self, config: GatewayConfig) -> None:
        """Takes other settings of the queue and of tenants. Requests that wait keep their places, and the service that tenants have received counts."""
        self._config, self._others = config.queue, config.other_tenants
        self._weights = {name: tenant.weight for name, tenant in config.tenants.items()}
        self._classes = {name: tenant.priority for name, tenant in config.tenants.items()}
        for line in self._lines.values():
            line.queue.follow(self._weights, self._others.weight, self._classes, self._others.priority)

    @property
    def waiting(self) -> dict[str, int]:
        """How many requests wait for each model."""
        return {model or "-": len(line.queue) for model, line in self._lines.items()}

    @property
    def waiting_tokens(self) -> dict[str, int]:
        """How many tokens the prompts have that wait for each model."""
        return {model or "-": sum(waiter.request.prompt_tokens for waiter in line.queue) for model, line in self._lines.items()}

    @property
    def oldest_s(self) -> float:
        """How long the one that waits longest has waited."""
        began = [waiter.since for line in self._lines.values() for waiter in line.queue]
        return self._clock() - min(began) if began else 0.0

    def waits_of(self, model: str) -> tuple[int, float]:
        """Returns how many requests for ``model`` wait, and for how many seconds the oldest has; one that names no model is for the only one that there is."""
        began = [waiter.since for name in (model, None) if name in self._lines for waiter in self._lines[name].queue]
        return len(began), self._clock() - min(began) if began else 0.0

    def __call__(self, request: InferenceRequest) -> "Turn":
        """Returns the turn of ``request``, as a context."""
        return Turn(self, request)

    async def begin(self, request: InferenceRequest) -> "Charge":
        """Waits for the request's turn. Raises ``ApiError`` if the queue is full, or the answer would not begin in time."""
        line = self._lines.get(request.model)
        if line is None:
            queue: FairQueue[_Waiter] = FairQueue(self._weights, self._others.weight, self._classes, self._others.priority)
            line = self._lines[request.model] = _Line(queue)
        room = self._room(line, request)
        # With no backend that works, and none that comes, there is nothing to wait for: the request is refused where it asks for one.
        if room is not None and (len(line.queue) or room <= 0):
            await self._wait(line, request)
        else:
            _check_time(0.0, self._pool.first_byte_s(request), math.inf, request.timeout_s)
        charge = Charge(line.queue, request.tenant)
        charge.prompt(request.prompt_tokens)
        return charge

    def end(self, request: InferenceRequest) -> None:
        """Counts the end of a request that had its turn."""
        line = self._lines[request.model]
        line.ended.append(self._clock())
        self._dispatch(line)

    def wake(self) -> None:
        """Gives turns where there is room, as after a backend has become ready."""
        for line in self._lines.values():
            self._dispatch(line)

    async def _wait(self, line: _Line, request: InferenceRequest) -> None:
        config, tenant = self._config, request.tenant
        expected_s = max(self._expected_s(line, tenant), self._pool.coming_s(request) or 0.0)
        total = sum(len(each.queue) for each in self._lines.values())
        if total >= config.max_waiting or line.queue.length(tenant) >= config.max_waiting_per_tenant:
            raise _refused("too many requests wait", expected_s)
        _check_time(expected_s, self._pool.first_byte_s(request), config.max_wait_s, request.timeout_s)
        limit_s = config.max_wait_s if request.timeout_s is None else min(config.max_wait_s, request.timeout_s)
        waiter = _Waiter(asyncio.get_running_loop().create_future(), self._clock(), request)
        line.queue.push(tenant, waiter, request.priority)
        try:
            async with asyncio.timeout(limit_s):
                await waiter.turn
        except TimeoutError:
            raise _refused(f"the request has waited {limit_s:g} s", self._expected_s(line, tenant)) from None
        finally:
            line.queue.remove(tenant, waiter)
            if waiter.turn.done() and not waiter.turn.cancelled():
                line.granted.remove(request)
                # Its turn may come together with its end; then it is the next one's.
                asyncio.get_running_loop().call_soon(self._dispatch, line)

    def _dispatch(self, line: _Line) -> None:
        while len(line.queue):
            _, waiter = line.queue.next()
            # Nobody overtakes a long prompt for which there is no room yet: it would wait for ever.
            if (self._room(line, waiter.request) or 0) <= 0:
                return
            line.queue.pop()
            if not waiter.turn.done():
                waiter.turn.set_result(None)
                line.granted.append(waiter.request)

    def _room(self, line: _Line, request: InferenceRequest) -> int | None:
        """Returns how many requests like ``request`` can go beside those that have their turn; ``None`` if no backend takes any."""
        room = self._pool.room(request, sum(each.prompt_tokens for each in line.granted))
        if room is None:
            return None if self._pool.coming_s(request) is None else 0
        return room - len(line.granted)

    def _expected_s(self, line: _Line, tenant: str) -> float:
        """Returns about how long a request of ``tenant`` would wait now, by how many requests ended of late; 0 while nothing is known."""
        now = self._clock()
        while line.ended and now - line.ended[0] > _RATE_WINDOW_S:
            line.ended.popleft()
        if len(line.ended) < 2:
            return 0.0
        rate = len(line.ended) / max(now - line.ended[0], 0.001)
        return (line.queue.ahead(tenant) + 1) / rate


class Turn:
    """One request's turn, as a context that begins when it has come."""

    __slots__ = ("_admission", "_request")

    def __init__(self, admission: Admission, request: InferenceRequest) -> None:
        self._admission, self._request = admission, request

    async def __aenter__(self) -> "Charge":
        return await self._admission.begin(self._request)

    async def __aexit__(self, *_: object) -> None:
        self._admission.end(self._request)


@dataclass
class Charge:
    """Counts what one request costs its tenant."""

    queue: FairQueue[_Waiter]
    tenant: str

    def prompt(self, tokens: int) -> None:
        self.queue.charge(self.tenant, PROMPT_WEIGHT * tokens)

    def output(self, tokens: int) -> None:
        self.queue.charge(self.tenant, OUTPUT_WEIGHT * tokens)


def _check_time(turn_s: float, first_byte_s: float, most_s: float, timeout_s: float | None) -> None:
    """Raises ``ApiError`` for a request whose turn would come in ``turn_s``, later than ``most_s``, or whose answer would begin ``first_byte_s`` after that,
    later than its client waits (``timeout_s``)."""
    if turn_s > most_s:
        raise _refused(f"the request would wait about {turn_s:.0f} s, more than {most_s:g} s", turn_s - most_s)
    if timeout_s is not None and turn_s + first_byte_s > timeout_s:
        raise _refused(f"the answer would begin in about {turn_s + first_byte_s:.1f} s, later than X-Request-Timeout ({timeout_s:g} s)",
                       turn_s + first_byte_s - timeout_s, "deadline_exceeded")  # fmt: skip


def _refused(message: str, seconds: float, code: str = "queue_full") -> ApiError:
    after = min(_MOST_RETRY_AFTER_S, max(1, math.ceil(seconds)))
    return ApiError(429, f"{message}; try again in {after} s", kind="rate_limit_error", code=code, retry_after_s=after)
