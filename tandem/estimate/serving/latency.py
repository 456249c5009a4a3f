"""The latency of requests on an engine that receives so many a second, by percentile: Poisson arrivals are played through it. Imports no torch."""

import math
import random
from dataclasses import dataclass
from itertools import accumulate

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.lengths import Lengths
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.played import PlayedRequest, StepTable, play
from tandem.estimate.serving.throughput import ServingLoad, most_running, predict_load, written_tokens
from tandem.layout.shapes import ModelShapes

REQUESTS, WARM_UP = 600, 150
"""That are played through, and how many of them arrive before the engine is in its steady state; these do not count."""


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
    requests = _requests(traffic)
    play(requests, steps, int(most), layout.max_num_batched_tokens)
    counted = requests[WARM_UP:]
    firsts = sorted(each.first_token_s - each.at_s for each in counted)
    further = sorted((each.finished_s - each.first_token_s) / (each.output_tokens - 1) for each in counted if each.output_tokens > 1)
    return Latency(load, tuple(firsts), tuple(further) or (0.0,))


def _requests(traffic: Traffic) -> list[PlayedRequest]:
    """Returns the requests that are played: drawn from a fixed seed, each distribution evenly."""
    rng, shares = random.Random(0), [(index + 0.5) / REQUESTS for index in range(REQUESTS)]
    gaps = [-math.log(1 - share) / traffic.requests_per_s for share in rng.sample(shares, REQUESTS)]
    prompts = [max(1.0, traffic.prompts.quantile(share) - traffic.shared_tokens) for share in rng.sample(shares, REQUESTS)]
    outputs = [max(1, round(traffic.outputs.quantile(share))) for share in rng.sample(shares, REQUESTS)]
    return [PlayedRequest(at, prompt, output) for at, prompt, output in zip(accumulate(gaps), prompts, outputs, strict=True)]


def _quantile(values: tuple[float, ...], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]
