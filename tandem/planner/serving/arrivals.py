"""Patterns of requests over time, drawn from a seed. Imports no torch."""

import math
import random
from typing import Literal, NamedTuple

from tandem.estimate.lengths import USUAL_SPREAD, Lengths
from tandem.types.errors import UserError

Pattern = Literal["steady", "bursty", "long_prompts"]
PATTERNS: tuple[Pattern, ...] = ("steady", "bursty", "long_prompts")
BURST = 8
"""Requests that arrive together in the pattern ``bursty``."""
LONG_SHARE, LONG_TIMES = 0.2, 4
"""The share of requests with long prompts in the pattern ``long_prompts``, and how many times as long they are as the others."""


class Arrival(NamedTuple):
    """A request that arrives ``at_s`` seconds after the start, with a prompt of ``prompt_tokens``, and ends after ``output_tokens``. The first
    ``shared_tokens`` of the prompt are those of every other request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0


def draw_arrivals(
    pattern: Pattern, count: int, requests_per_s: float, prompt_tokens: float, output_tokens: float, *, seed: int = 0, longest: int = 2**20
) -> list[Arrival]:
    """Returns ``count`` arrivals at ``requests_per_s`` on average, with lognormal lengths of these means. ``steady``: a Poisson process. ``bursty``: bursts of
    ``BURST`` requests, which are one. ``long_prompts``: as ``steady``, and a share of the prompts is several times as long. ``longest``: of prompt and
    output together. Raises ``UserError`` for an unknown pattern or a rate that is not above 0."""
    if pattern not in PATTERNS:
        raise UserError(f"arrival pattern is '{pattern}'; it must be one of {', '.join(PATTERNS)}")
    if not 0 < requests_per_s < math.inf:
        raise UserError(f"requests per second are {requests_per_s}; they must be above 0")
    rng, now, arrivals = random.Random(seed), 0.0, list[Arrival]()
    usual = prompt_tokens / (1 + LONG_SHARE * (LONG_TIMES - 1)) if pattern == "long_prompts" else prompt_tokens
    for index in range(count):
        if pattern != "bursty":
            now += rng.expovariate(requests_per_s)
        elif index % BURST == 0:
            now += rng.expovariate(requests_per_s / BURST)
        mean = usual * (LONG_TIMES if pattern == "long_prompts" and rng.random() < LONG_SHARE else 1)
        prompt = min(_length(rng, mean), longest - 1)
        arrivals.append(Arrival(now, prompt, min(_length(rng, output_tokens), longest - prompt)))
    return arrivals


def draw_arrivals_of(
    requests_per_s: float, prompts: Lengths, outputs: Lengths, count: int, *, shared_tokens: int = 0, seed: int = 0
) -> list[Arrival]:
    """Returns ``count`` Poisson arrivals with these lengths, all prompts of which begin with ``shared_tokens`` tokens in common."""
    rng, now, arrivals = random.Random(seed), 0.0, list[Arrival]()
    for _ in range(count):
        now += rng.expovariate(requests_per_s)
        prompt, output = (max(1, round(lengths.quantile(min(1 - 1e-9, max(1e-9, rng.random()))))) for lengths in (prompts, outputs))
        arrivals.append(Arrival(now, max(prompt, shared_tokens + 1), output, shared_tokens))
    return arrivals


def _length(rng: random.Random, mean: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - USUAL_SPREAD**2 / 2, USUAL_SPREAD)))
