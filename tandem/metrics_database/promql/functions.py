"""The functions of PromQL on the samples of a range and on buckets, with Prometheus' own arithmetic (promql/functions.go and promql/quantile.go, 2.42)."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

Sample = tuple[int, float]
"""Milliseconds since 1970, and a value."""


def _extrapolated(samples: Sequence[Sample], start_ms: int, end_ms: int, *, is_counter: bool, is_rate: bool) -> float | None:
    """Returns the growth over the whole range, as if it went on at the ends of the samples where these are near those of the range."""
    if len(samples) < 2:
        return None
    grown = samples[-1][1] - samples[0][1]
    if is_counter:
        # A counter that became smaller has begun at 0 again.
        grown += sum(before for (_, before), (_, after) in pairwise(samples) if after < before)
    to_start, to_end = (samples[0][0] - start_ms) / 1000, (end_ms - samples[-1][0]) / 1000
    sampled = (samples[-1][0] - samples[0][0]) / 1000
    between = sampled / (len(samples) - 1)
    if is_counter and grown > 0 and samples[0][1] >= 0:
        # It cannot have been below 0.
        to_start = min(to_start, sampled * (samples[0][1] / grown))
    whole = sampled
    for beyond in (to_start, to_end):
        whole += beyond if beyond < between * 1.1 else between / 2
    factor = whole / sampled
    if is_rate:
        factor /= (end_ms - start_ms) / 1000
    return grown * factor


def _irate(samples: Sequence[Sample], start_ms: int, end_ms: int) -> float | None:
    if len(samples) < 2:
        return None
    (before_ms, before), (after_ms, after) = samples[-2:]
    return (after if after < before else after - before) / ((after_ms - before_ms) / 1000)


def _over(fold: Callable[[list[float]], float]) -> "OnRange":
    return lambda samples, start_ms, end_ms: fold([value for _, value in samples]) if samples else None


OnRange = Callable[[Sequence[Sample], int, int], float | None]
ON_RANGES: Mapping[str, OnRange] = {
    "rate": lambda samples, start, end: _extrapolated(samples, start, end, is_counter=True, is_rate=True),
    "increase": lambda samples, start, end: _extrapolated(samples, start, end, is_counter=True, is_rate=False),
    "delta": lambda samples, start, end: _extrapolated(samples, start, end, is_counter=False, is_rate=False),
    "irate": _irate,
    "max_over_time": _over(max),
    "min_over_time": _over(min),
    "avg_over_time": _over(lambda values: math.fsum(values) / len(values)),
    "sum_over_time": _over(math.fsum),
    "count_over_time": _over(lambda values: float(len(values))),
    "last_over_time": _over(lambda values: values[-1]),
}
"""Each of the samples of a range, its start and its end in milliseconds; ``None``: no value."""


def quantile_of_buckets(quantile: float, buckets: Sequence[tuple[float, float]]) -> float:
    """Returns the quantile of a histogram from the upper bounds of its ``buckets``, ascending, and the counts up to each; NaN where there is none."""
    if math.isnan(quantile) or len(buckets) < 2 or buckets[-1][0] != math.inf:
        return math.nan
    if not 0 <= quantile <= 1:
        return -math.inf if quantile < 0 else math.inf
    uppers, counts = [buckets[0][0]], [buckets[0][1]]
    for upper, count in buckets[1:]:
        if upper == uppers[-1]:
            counts[-1] += count
        else:
            uppers.append(upper)
            # Rates of buckets that were not read at one moment may fall.
            counts.append(max(count, counts[-1]))
    if len(uppers) < 2 or not counts[-1] > 0:
        return math.nan
    rank = quantile * counts[-1]
    place = next((at for at, count in enumerate(counts[:-1]) if count >= rank), len(counts) - 1)
    if place == len(counts) - 1:
        return uppers[-2]
    if place == 0 and uppers[0] <= 0:
        return uppers[0]
    start, before = (uppers[place - 1], counts[place - 1]) if place else (0.0, 0.0)
    return start + (uppers[place] - start) * ((rank - before) / (counts[place] - before))
