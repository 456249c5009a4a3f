"""The latency of requests on an engine that receives so many a second, by percentile. Imports no torch.

Requests with Poisson arrivals are played through an engine with continuous batching and chunked prefill, from one event to the next: between an arrival and
the end of a sequence all steps are alike, so that their number does not count. Every step computes the prompts that wait, as far as its token budget goes, and
a token of every sequence that runs; its time is interpolated between those that ``step_time`` predicts. The serving simulator of the planner does the same
with the engine's own scheduler, which has the blocks of the KV cache too and takes a hundred times as long; a test compares both.
"""

import heapq
import math
import random
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.lengths import Lengths
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.step_time import EngineStep, predict_step
from tandem.estimate.serving.throughput import ServingLoad, most_running, predict_load, written_tokens
from tandem.layout.shapes import ModelShapes

REQUESTS, WARM_UP = 600, 150
"""That are played through, and how many of them arrive before the engine is in its steady state; these do not count."""
PROMPT_SHARES = (0.0, 0.02, 0.1, 0.3, 0.6, 1.0)
"""Of the token budget, for which a step is predicted."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What arrives: ``requests_per_s``, with ``prompts`` and ``outputs``. ``shared_tokens``: of every prompt, which the prefix cache has."""

    requests_per_s: float
    prompts: Lengths
    outputs: Lengths
    shared_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Of requests on an engine in the steady state ``load``: seconds until the first token, and for each further one, ascending."""

    load: ServingLoad
    first_token: tuple[float, ...]
    output_token: tuple[float, ...]

    def first_token_s(self, share: float) -> float:
        """Returns the time from arrival to the first token that ``share`` of the requests do not exceed."""
        return _quantile(self.first_token, share)

    def output_token_s(self, share: float) -> float:
        """Returns the time per output token that ``share`` of the requests do not exceed."""
        return _quantile(self.output_token, share)


def predict_latency(shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, traffic: Traffic) -> Latency | None:
    """Returns the latency of ``traffic`` on one engine, ``None`` if it cannot complete so many requests."""
    prompts, outputs = traffic.prompts, traffic.outputs
    load = predict_load(
        shapes, layout, hardware, traffic.requests_per_s, prompts.mean, outputs.mean, shared_tokens=traffic.shared_tokens, variation=outputs.variation
    )
    if load is None:
        return None
    most = most_running(shapes, layout, hardware, prompts.mean, outputs.mean, shared_tokens=traffic.shared_tokens, variation=outputs.variation)
    context = prompts.mean + written_tokens(outputs.mean, outputs.variation)
    steps = StepTable(shapes, layout, hardware, most, context, (prompts.mean + traffic.shared_tokens) / 2)
    played = _Played(steps, int(most), layout.max_num_batched_tokens)
    return Latency(load, *played.run(*_requests(traffic)))


class StepTable:
    """The seconds of steps with up to ``most`` sequences of ``context`` tokens, and with prompt tokens that attend to ``before`` earlier ones on average."""

    def __init__(self, shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, most: float, context: float, before: float) -> None:
        self.sizes = sorted({0.0, 1.0, min(8.0, most), most / 4, most / 2, most})
        self.rows = [share * layout.max_num_batched_tokens for share in PROMPT_SHARES]
        self.seconds = [
            [predict_step(shapes, layout, hardware, EngineStep(size, context, rows, before)).seconds for rows in self.rows] for size in self.sizes
        ]

    def __call__(self, running: int, prompt_tokens: float) -> float:
        at = min(max(bisect_right(self.sizes, running), 1), len(self.sizes) - 1)
        low, high = self.sizes[at - 1], self.sizes[at]
        share = (running - low) / (high - low)
        if not prompt_tokens:
            return (1 - share) * self.seconds[at - 1][0] + share * self.seconds[at][0]
        to = min(max(bisect_right(self.rows, prompt_tokens), 1), len(self.rows) - 1)
        part = (prompt_tokens - self.rows[to - 1]) / (self.rows[to] - self.rows[to - 1])
        below, above = self.seconds[at - 1], self.seconds[at]
        return (1 - share) * ((1 - part) * below[to - 1] + part * below[to]) + share * ((1 - part) * above[to - 1] + part * above[to])


def _requests(traffic: Traffic) -> tuple[list[float], list[float], list[int]]:
    """Returns when requests arrive, how many tokens of each prompt are computed, and how many are drawn: from a fixed seed, each distribution evenly."""
    rng, shares = random.Random(0), [(index + 0.5) / REQUESTS for index in range(REQUESTS)]
    gaps = [-math.log(1 - share) / traffic.requests_per_s for share in rng.sample(shares, REQUESTS)]
    prompts = [max(1.0, traffic.prompts.quantile(share) - traffic.shared_tokens) for share in rng.sample(shares, REQUESTS)]
    outputs = [max(1, round(traffic.outputs.quantile(share))) for share in rng.sample(shares, REQUESTS)]
    at, arrivals = 0.0, []
    for gap in gaps:
        at += gap
        arrivals.append(at)
    return arrivals, prompts, outputs


class _Played:
    def __init__(self, steps: StepTable, most: int, budget: int) -> None:
        self.steps, self.most, self.budget = steps, max(1, most), budget

    def run(self, arrivals: list[float], prompts: list[float], outputs: list[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the seconds to the first token, and per further token, of the requests after ``WARM_UP``."""
        left, first = list(prompts), [0.0] * len(arrivals)
        waiting, running = deque[int](), list[tuple[int, int]]()  # (the step in which it ends, request)
        first_tokens, output_tokens, now, step, number, ended = list[float](), list[float](), 0.0, 0, 0, 0
        while ended < len(arrivals):
            if not running and not waiting and number < len(arrivals):
                now = max(now, arrivals[number])
            while number < len(arrivals) and arrivals[number] <= now:
                waiting.append(number)
                number += 1
            room, started = float(self.budget - len(running)), list[int]()
            while waiting and room > 0 and len(running) + len(started) < self.most:
                chunk = min(room, left[waiting[0]])
                room -= chunk
                left[waiting[0]] -= chunk
                if left[waiting[0]] <= 0:
                    started.append(waiting.popleft())
            computed = self.budget - len(running) - room
            seconds, count = self.steps(len(running), computed), 1
            if not computed and running:
                # Until a sequence ends or a request can begin, every step is like this one.
                count = running[0][0] - step
                if number < len(arrivals) and len(running) < self.most:
                    count = min(count, max(1, math.ceil((arrivals[number] - now) / seconds)))
            now, step = now + count * seconds, step + count
            for request in started:
                first[request] = now
                if request >= WARM_UP:
                    first_tokens.append(now - arrivals[request])
                heapq.heappush(running, (step + outputs[request] - 1, request))
            while running and running[0][0] <= step:
                _, request = heapq.heappop(running)
                ended += 1
                if request >= WARM_UP and outputs[request] > 1:
                    output_tokens.append((now - first[request]) / (outputs[request] - 1))
        return tuple(sorted(first_tokens)), tuple(sorted(output_tokens)) or (0.0,)


def _quantile(values: tuple[float, ...], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]
