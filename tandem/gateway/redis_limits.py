"""The limits of several gateways, counted in Redis. Needs the extra ``redis``.

Each limit is a hash (window, used, held) and a sorted set of its reservations by the time when they end. A script reads and changes all limits of a request as
one step, by Redis' own clock. Reservations last a minute and are renewed while their gateway lives, so that one that dies leaves nothing behind for longer.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tandem.gateway.rate_limit import EmbeddedLimits, Limits, Refusal, Share, refusal

RESERVED_S = 60
_RENEW_S = 15.0
_AWAY_S = 1.0
"""How long Redis is left alone after it has not answered."""
_MOST_UNSETTLED = 100_000

_COMMON = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
-- Brings a limit up to date: a new window begins with nothing used, reservations that have ended hold nothing.
local function taken(limit, reservations, window_s)
    local window = window_s > 0 and math.floor(now / window_s) or 0
    if tonumber(redis.call('HGET', limit, 'window') or -1) ~= window then
        redis.call('HSET', limit, 'window', window, 'used', 0)
    end
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', reservations, '-inf', now)) do
        redis.call('ZREM', reservations, member)
        -- Not the number's negative: of 0 that is '-0', which Redis does not read.
        redis.call('HINCRBY', limit, 'held', 0 - tonumber(string.match(member, '^%d+')))
    end
    return tonumber(redis.call('HGET', limit, 'used')) + tonumber(redis.call('HGET', limit, 'held') or 0)
end
"""
# KEYS: hash and sorted set of each limit. ARGV: id, seconds reserved, then limit, window, amount of each.
_RESERVE = f"""{_COMMON}
local left = {{}}
for i = 1, #KEYS / 2 do
    local limit, window_s, amount = tonumber(ARGV[3 * i]), tonumber(ARGV[3 * i + 1]), tonumber(ARGV[3 * i + 2])
    left[i] = limit - taken(KEYS[2 * i - 1], KEYS[2 * i], window_s) - amount
    if left[i] < 0 then
        return {{i, tostring(now)}}
    end
end
for i = 1, #KEYS / 2 do
    local window_s, amount = tonumber(ARGV[3 * i + 1]), tonumber(ARGV[3 * i + 2])
    redis.call('ZADD', KEYS[2 * i], now + ARGV[2], amount .. ':' .. ARGV[1])
    redis.call('HINCRBY', KEYS[2 * i - 1], 'held', amount)
    redis.call('EXPIRE', KEYS[2 * i - 1], window_s + 2 * ARGV[2])
    redis.call('EXPIRE', KEYS[2 * i], window_s + 2 * ARGV[2])
end
return {{0, tostring(now), unpack(left)}}
"""
# ARGV: id, then window, amount reserved, amount used of each.
_SETTLE = f"""{_COMMON}
for i = 1, #KEYS / 2 do
    local window_s, reserved, used = tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i]), tonumber(ARGV[3 * i + 1])
    taken(KEYS[2 * i - 1], KEYS[2 * i], window_s)
    if redis.call('ZREM', KEYS[2 * i], reserved .. ':' .. ARGV[1]) == 1 then
        redis.call('HINCRBY', KEYS[2 * i - 1], 'held', 0 - reserved)
    end
    if window_s > 0 then
        redis.call('HINCRBY', KEYS[2 * i - 1], 'used', used)
    end
    redis.call('EXPIRE', KEYS[2 * i - 1], window_s + 120)
end
return 1
"""
# ARGV: id, seconds reserved, then the amount of each.
_RENEW = """
local time = redis.call('TIME')
for i = 1, #KEYS / 2 do
    redis.call('ZADD', KEYS[2 * i], 'XX', tonumber(time[1]) + ARGV[2], ARGV[i + 2] .. ':' .. ARGV[1])
    redis.call('EXPIRE', KEYS[2 * i - 1], 86400 + 2 * ARGV[2])
    redis.call('EXPIRE', KEYS[2 * i], 86400 + 2 * ARGV[2])
end
return 1
"""


class RedisLimits(Limits):
    """Limits that gateways share. While Redis does not answer, each gateway counts alone: requests go on, and a limit holds for each gateway; what
    has ended meanwhile is settled in Redis afterwards. ``say``: writes a line when Redis goes and comes. ``processes``: of this gateway; each has its part of
    the limits while it counts alone, so that the gateway overruns none."""

    def __init__(
        self, url: str, prefix: str, timeout_s: float, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic, processes: int = 1
    ) -> None:
        self._redis: Redis = Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
        self._prefix, self._say, self._clock = prefix, say, clock
        self._reserve, self._settle, self._renew = map(self._redis.register_script, (_RESERVE, _SETTLE, _RENEW))
        self._alone, self._processes = EmbeddedLimits(), processes
        self._away_until: float | None = None
        self._held: dict[str, tuple[Share, ...]] = {}
        self._unsettled: deque[tuple[str, tuple[Share, ...], int, int, int]] = deque(maxlen=_MOST_UNSETTLED)

    @property
    def reservations(self) -> int:
        return len(self._held) + len(self._unsettled) + self._alone.reservations

    async def reserve(self, id: str, shares: Sequence[Share]) -> list[int] | Refusal:
        if not shares:
            return []
        arguments = [id, RESERVED_S, *(each for share in shares for each in (share.limit, share.window_s, share.amount))]
        answer = await self._call(self._reserve, shares, arguments)
        if answer is None:
            return await self._reserve_alone(id, shares)
        over, now, *left = answer
        if over:
            return refusal(shares[over - 1], float(now))
        self._held[id] = tuple(shares)
        return [int(each) for each in left]

    async def _reserve_alone(self, id: str, shares: Sequence[Share]) -> list[int] | Refusal:
        if self._processes == 1:
            return await self._alone.reserve(id, shares)
        answer = await self._alone.reserve(id, [replace(share, limit=share.limit // self._processes) for share in shares])
        if not isinstance(answer, Refusal):
            return answer
        whole = next(share for share in shares if share.name == answer.share.name)
        fits_later = answer.retry_after_s is None and whole.amount <= whole.limit
        return Refusal(whole, _AWAY_S if fits_later else answer.retry_after_s)

    async def settle(self, id: str, shares: Sequence[Share], tokens: int, requests: int, input_tokens: int = 0) -> None:
        if self._held.pop(id, None) is None:
            await self._alone.settle(id, shares, tokens, requests, input_tokens)
            return
        self._unsettled.append((id, tuple(shares), tokens, requests, input_tokens))
        # The end of the gateway must not cancel it halfway.
        await asyncio.shield(self.flush())

    async def flush(self) -> None:
        """Settles what has ended; what Redis does not take stays for the next time."""
        while self._unsettled:
            id, shares, tokens, requests, input_tokens = entry = self._unsettled.popleft()
            used = [(share.window_s, share.amount, share.used(requests, tokens, input_tokens)) for share in shares]
            if await self._call(self._settle, shares, [id, *(each for row in used for each in row)]) is None:
                self._unsettled.appendleft(entry)
                return

    async def keep(self) -> None:
        """Renews the reservations of requests in flight, for ever."""
        while True:
            await asyncio.sleep(_RENEW_S)
            for id, shares in list(self._held.items()):
                await self._call(self._renew, shares, [id, RESERVED_S, *(share.amount for share in shares)])
            await self.flush()

    async def close(self) -> None:
        await self._redis.aclose()

    async def _call(self, script: Any, shares: Sequence[Share], arguments: list[Any]) -> Any:
        """Returns what the script answers, ``None`` if Redis does not."""
        if self._away_until is not None and self._clock() < self._away_until:
            return None
        # One hash tag: in a cluster all keys of a script must be on one node.
        keys = [f"{{{self._prefix}}}:{share.name}{end}" for share in shares for end in ("", ":held")]
        try:
            answer = await script(keys=keys, args=arguments)
        except (RedisError, OSError, TimeoutError) as error:
            if self._away_until is None:
                self._say(f"Redis does not answer ({type(error).__name__}); this gateway counts limits alone until it does")
            self._away_until = self._clock() + _AWAY_S
            return None
        if self._away_until is not None:
            self._away_until = None
            self._say("Redis answers again; limits are shared")
        return answer
