"""Plays requests through an engine with continuous batching and chunked prefill, from one event to the next. Imports no torch.

Between an arrival and the end of a sequence all steps are alike, so that their number does not count. Every step computes the prompts that wait, as far as its
token budget goes, and a token of every sequence that runs; its time is interpolated between those that ``step_time`` predicts. The serving simulator of the
planner does the same with the engine's own scheduler, which has the blocks of the KV cache too and takes a hundred times as long; a test compares both.
"""

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.serving.kernels import KERNELS
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.speculation import Speculation
from tandem.estimate.serving.step_time import EngineStep, predict_step
from tandem.layout.shapes import ModelShapes

PROMPT_SHARES = (0.0, 0.02, 0.1, 0.3, 0.6, 1.0)
"""Of the token budget, for which a step is predicted."""


class StepTable:
    """The seconds of steps with up to ``most`` sequences of ``context`` tokens, and with prompt tokens that attend to ``before`` earlier ones on average. With
    ``speculation``, those of a step without prompts are for each token that its sequences draw; beside prompts nothing is drafted."""

    def __init__(
        self, shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, most: float, context: float, before: float,
        speculation: Speculation | None = None,
    ) -> None:
        self.sizes = sorted({0.0, 1.0, min(8.0, most), most / 4, most / 2, most})
        self.rows = [share * layout.max_num_batched_tokens for share in PROMPT_SHARES]
        self.seconds = [
            [predict_step(shapes, layout, hardware, EngineStep(size, context, rows, before)).seconds for rows in self.rows] for size in self.sizes
        ]
        for size, seconds in zip(self.sizes, self.seconds, strict=True):
            if speculation is not None and 0 < size <= speculation.most_sequences:
                each = _drafted_seconds(shapes, layout, hardware, EngineStep(size, context, drafts=speculation.drafts), speculation)
                seconds[0] = min(seconds[0], each) if speculation.is_adaptive else each

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


def _drafted_seconds(shapes: ModelShapes, layout: ServingLayout, hardware: Hardware, step: EngineStep, speculation: Speculation) -> float:
    """Returns the seconds of ``step`` with its drafts, for each token that a sequence draws in it."""
    drafted = speculation.drafts * speculation.draft_bytes / (KERNELS[layout.kernels].bandwidth * hardware.memory_bandwidth)
    return (predict_step(shapes, layout, hardware, step).seconds + drafted) / speculation.tokens_a_step


@dataclass(slots=True)
class PlayedRequest:
    """A request that arrives at ``at_s``, of whose prompt ``prompt_tokens`` are computed (0: another's are taken), and that draws ``output_tokens``."""

    at_s: float
    prompt_tokens: float
    output_tokens: int
    first_token_s: float = 0.0
    finished_s: float = 0.0


def play(requests: Sequence[PlayedRequest], steps: StepTable, most: int, budget: int) -> float:
    """Sets when each of ``requests``, ascending by arrival, has its first token and is finished; returns the seconds until all are. ``most``: sequences
    that run at once; ``budget``: tokens of a step."""
    left = [request.prompt_tokens for request in requests]
    waiting, running = deque[int](), list[tuple[int, int]]()  # (the step in which it ends, request)
    now, step, number, ended, most = 0.0, 0, 0, 0, max(1, most)
    while ended < len(requests):
        if not running and not waiting and number < len(requests):
            now = max(now, requests[number].at_s)
        while number < len(requests) and requests[number].at_s <= now:
            waiting.append(number)
            number += 1
        room, started = float(max(1, budget - len(running))), list[int]()
        computed = 0.0
        while waiting and room > 0 and len(running) + len(started) < most:
            chunk = min(room, left[waiting[0]])
            room, computed = room - chunk, computed + chunk
            left[waiting[0]] -= chunk
            if left[waiting[0]] <= 0:
                started.append(waiting.popleft())
        seconds, count = steps(len(running), computed), 1
        if running and not computed and not started:
            # Until a sequence ends or a request can begin, every step is like this one.
            count = running[0][0] - step
            if number < len(requests) and len(running) < most:
                count = min(count, max(1, math.ceil((requests[number].at_s - now) / seconds)))
        now, step = now + count * seconds, step + count
        for index in started:
            requests[index].first_token_s = now
            heapq.heappush(running, (step + requests[index].output_tokens - 1, index))
        while running and running[0][0] <= step:
            requests[heapq.heappop(running)[1]].finished_s = now
            ended += 1
    return now
