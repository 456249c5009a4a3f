"""How many servers there should be: a pure function of what waits and what runs."""

import math
from dataclasses import dataclass

from tandem.config.servers import ScaleConfig


@dataclass(frozen=True, slots=True)
class Load:
    """What a group of servers has to do at ``now_s`` (monotonic). ``waiting``: requests that wait for one of them; ``oldest_s``: how long the oldest has;
    ``in_flight``: requests at them. ``count``: servers that there should be; ``loading``: those of them that were not ready yet."""

    now_s: float
    waiting: int
    oldest_s: float
    in_flight: int
    count: int
    loading: int


@dataclass(frozen=True, slots=True)
class Since:
    """Since when requests wait too long (``oldest_s``: how long the oldest had waited then), and since when there are more servers than are needed; ``None``:
    it is not so."""

    late_s: float | None = None
    oldest_s: float = 0.0
    low_s: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """How many servers there should be from now on, and why."""

    count: int
    reason: str


def decide(config: ScaleConfig, requests_each: int, since: Since, load: Load) -> tuple[Since, Decision | None]:
    """Returns since when things are as they are after ``load``, and the change that follows, ``None`` if there is none.

    More servers are wanted when the oldest request has waited longer than ``target_wait_s`` in every look for ``upscale_delay_s``, and at the end no less
    than at the beginning (a queue that gets shorter needs time and no server): as many more as the waiting requests fill (``requests_each``), at least one.
    While one loads nothing is decided, since what it will change is not known yet. One less is wanted when for ``downscale_delay_s`` nothing has waited and
    those that stay would have at most ``low_requests`` each. Both times begin anew after every change, so that two changes in opposite directions are that
    far apart."""
    count = load.count
    if count == 0:
        return Since(), Decision(min(config.max_count, _filled(load, requests_each)), "a request waits and there is no server") if load.waiting else None
    is_late = load.oldest_s > config.target_wait_s and not load.loading
    is_low = not load.waiting and not load.oldest_s and not load.loading and load.in_flight <= (count - 1) * config.low_requests
    late_s, low_s = _since(since.late_s, is_late, load.now_s), _since(since.low_s, is_low, load.now_s)
    since = Since(late_s, load.oldest_s if late_s == load.now_s else since.oldest_s, low_s)
    if late_s is not None and load.now_s - late_s >= config.upscale_delay_s and count < config.max_count:
        if load.oldest_s < since.oldest_s:
            return Since(load.now_s, load.oldest_s), None
        reason = f"the oldest request has waited {load.oldest_s:.1f} s, {load.waiting} wait (target_wait_s: {config.target_wait_s:g})"
        return Since(), Decision(min(config.max_count, count + _filled(load, requests_each)), reason)
    if low_s is not None and load.now_s - low_s >= config.downscale_delay_s and count > config.min_count:
        return Since(), Decision(count - 1, f"nothing has waited for {load.now_s - low_s:.0f} s and {load.in_flight} requests are in flight")
    return since, None


def _filled(load: Load, requests_each: int) -> int:
    return max(1, math.ceil(load.waiting / requests_each))


def _since(before_s: float | None, is_so: bool, now_s: float) -> float | None:
    return (now_s if before_s is None else before_s) if is_so else None
