"""Limits on requests and tokens: reserved before a request is sent on, settled when it has ended. Here in the memory of one gateway."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tandem.config.gateway import LIMITS, LimitConfig
from tandem.serving.errors import ApiError

_MINUTE_S, _DAY_S = 60, 86_400
_MOST_COUNTERS = 10_000
Unit = Literal["requests", "tokens", "input_tokens", "output_tokens"]
_TOKEN_UNITS: tuple[Unit, ...] = ("tokens", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Share:
    """What a request takes of one limit. ``window_s``: 0 for requests at once. ``unit``: what it counts; tokens are those of prompt and
    answer."""

    name: str
    limit: int
    window_s: int
    amount: int
    unit: Unit

    @property
    def is_tokens(self) -> bool:
        return self.unit != "requests"

    def used(self, requests: int, tokens: int, input_tokens: int) -> int:
        """Returns what of it was used, of ``tokens`` in all of which ``input_tokens`` were the prompt."""
        return _amount(self.unit, requests, tokens, input_tokens)


def _amount(unit: Unit, requests: int, tokens: int, input_tokens: int) -> int:
    if unit == "requests":
        return requests
    if unit == "tokens":
        return tokens
    return input_tokens if unit == "input_tokens" else max(0, tokens - input_tokens)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The limit that a request would exceed, and the seconds until it could fit; ``None`` if it never can."""

    share: Share
    retry_after_s: float | None


class Limits(Protocol):
    """Where the use of limits is counted."""

    @property
    def reservations(self) -> int:
        """How many requests have a reservation that is not settled."""

    async def reserve(self, id: str, shares: Sequence[Share]) -> "list[int] | Refusal":
        """Reserves all ``shares`` under ``id`` and returns what is left of each limit, or reserves none of them and returns the first that does not fit."""

    async def settle(self, id: str, shares: Sequence[Share], tokens: int, requests: int, input_tokens: int = 0) -> None:
        """Replaces the reservation ``id`` by what was used. Called once for each reservation."""


@dataclass
class _Counter:
    """One limit's use. ``used``: settled in ``window``; ``held``: reserved, and ``held_amount`` the sum of that. What is held ends with its request, at the
    latest with the process."""

    window: int = 0
    used: int = 0
    held: dict[str, int] = field(default_factory=dict)
    held_amount: int = 0

    def taken(self, window: int) -> int:
        """Returns what is used in ``window`` and reserved."""
        if window != self.window:
            self.window, self.used = window, 0
        return self.used + self.held_amount

    def hold(self, id: str, amount: int) -> None:
        """Reserves ``amount`` for the request ``id``, in place of what it has."""
        self.held_amount += amount - self.held.get(id, 0)
        self.held[id] = amount

    def release(self, id: str) -> None:
        """Ends what is reserved for the request ``id``."""
        self.held_amount -= self.held.pop(id, 0)


class EmbeddedLimits(Limits):
    """The limits of one gateway process. ``clock``: seconds since the epoch, as windows are minutes and days of UTC."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._counters: dict[str, _Counter] = {}
        self._purge_at = _MOST_COUNTERS

    @property
    def reservations(self) -> int:
        return len({id for counter in self._counters.values() for id in counter.held})

    async def reserve(self, id: str, shares: Sequence[Share]) -> list[int] | Refusal:
        now = self._clock()
        if len(self._counters) > self._purge_at:
            self._purge(now)
        counters = [self._counter(share, now) for share in shares]
        left = [share.limit - taken - share.amount for share, (_, taken) in zip(shares, counters, strict=True)]
        for share, rest in zip(shares, left, strict=True):
            if rest < 0:
                return refusal(share, now)
        for share, (counter, _) in zip(shares, counters, strict=True):
            counter.hold(id, share.amount)
        return left

    async def settle(self, id: str, shares: Sequence[Share], tokens: int, requests: int, input_tokens: int = 0) -> None:
        now = self._clock()
        for share in shares:
            counter, _ = self._counter(share, now)
            counter.release(id)
            if share.window_s:
                counter.used += share.used(requests, tokens, input_tokens)
            elif not counter.held:
                del self._counters[share.name]

    def used(self, shares: Sequence[Share]) -> list[int]:
        """Returns what is used and reserved of each limit."""
        now = self._clock()
        counters = [(self._counters.get(share.name), int(now // share.window_s) if share.window_s else 0) for share in shares]
        return [0 if counter is None else counter.taken(window) for counter, window in counters]

    def _purge(self, now: float) -> None:
        """Forgets the counters of those who have been away for a day."""
        day = int(now // _DAY_S)
        for name, counter in list(self._counters.items()):
            window_s = _DAY_S if name.endswith("_day") else _MINUTE_S
            if not counter.held and counter.window * window_s < (day - 1) * _DAY_S:
                del self._counters[name]
        self._purge_at = max(_MOST_COUNTERS, 2 * len(self._counters))

    def _counter(self, share: Share, now: float) -> tuple[_Counter, int]:
        counter = self._counters.get(share.name)
        if counter is None:
            counter = self._counters[share.name] = _Counter()
        return counter, counter.taken(int(now // share.window_s) if share.window_s else 0)


def refusal(share: Share, now: float) -> Refusal:
    """Returns the refusal of a request that does not fit ``share`` at ``now``."""
    return Refusal(share, None if share.amount > share.limit else resets_in_s(share, now))


def resets_in_s(share: Share, now: float) -> float:
    """Returns the seconds until the window of ``share`` ends; one second for requests at once, which end when they end."""
    return share.window_s - now % share.window_s if share.window_s else 1.0


def shares_of(who: str, limits: LimitConfig, tokens: int, input_tokens: int = 0) -> list[Share]:
    """Returns what a request of ``tokens`` tokens, its prompt of ``input_tokens`` and the most it may generate, takes of the limits of ``who``."""
    return [Share(name, limit, window_s, _amount(unit, 1, tokens, input_tokens), unit) for name, limit, window_s, unit in _limits_of(who, limits)]


@functools.lru_cache(maxsize=4096)
def _limits_of(who: str, limits: LimitConfig) -> tuple[tuple[str, int, int, Unit], ...]:
    """Returns name, limit, window in seconds and unit of each of the limits of ``who``."""
    return tuple((f"{who}:{name}", limit, *_counted(name)) for name in LIMITS if (limit := getattr(limits, name)) is not None)


def _counted(name: str) -> tuple[int, Unit]:
    """Returns the window in seconds and the unit of the limit ``name``."""
    unit: Unit = next((each for each in _TOKEN_UNITS if name.startswith(f"{each}_per")), "requests")
    return _MINUTE_S if name.endswith("_minute") else _DAY_S if name.endswith("_day") else 0, unit


def refused(over: Refusal) -> ApiError:
    """Returns the error for a request that exceeds a limit."""
    share, unit = over.share, over.share.unit.replace("_", " ")
    kind = "tokens" if share.is_tokens else "requests"
    name = share.name.rpartition(":")[2].replace("_", " ")
    if over.retry_after_s is None:
        return ApiError(429, f"the request may take {share.amount} {unit}, more than the limit ({name}: {share.limit}); make it smaller", kind=kind,
                        code="rate_limit_exceeded", is_final=True)  # fmt: skip
    after = max(1, math.ceil(over.retry_after_s))
    return ApiError(429, f"rate limit reached ({name}: {share.limit}); try again in {after} s", kind=kind, code="rate_limit_exceeded", retry_after_s=after)


def limit_headers(shares: Sequence[Share], left: Sequence[int], now: float) -> list[tuple[bytes, bytes]]:
    """Returns OpenAI's ``x-ratelimit-*``: for requests and for tokens the limit of which the smallest part is ``left``."""
    headers: list[tuple[bytes, bytes]] = []
    for unit, is_tokens in (("requests", False), ("tokens", True)):
        parts = [(rest, share) for rest, share in zip(left, shares, strict=True) if share.window_s and share.is_tokens is is_tokens]
        if parts:
            rest, share = min(parts, key=lambda part: part[0] / part[1].limit)
            values = (("limit", str(share.limit)), ("remaining", str(rest)), ("reset", f"{resets_in_s(share, now):.0f}s"))
            headers += [(f"x-ratelimit-{name}-{unit}".encode(), value.encode()) for name, value in values]
    return headers
