"""Simulates an engine: the engine's own scheduler and KV cache manager decide every step, and a time model says how long it takes. Imports no torch."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.engine.core.lifecycle import Transition, move
from tandem.engine.core.prefill_budget import PrefillBudget
from tandem.engine.core.request import Request, random_key
from tandem.engine.core.request import Sequence as EngineSequence
from tandem.engine.core.scheduler import Scheduler, SchedulerConfig
from tandem.engine.core.scheduler_output import SchedulerOutput
from tandem.engine.kv_cache.block_pool import blocks_for
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.engine.kv_cache.state_rows import StateRows
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.estimate.serving.step_time import EngineStep
from tandem.planner.serving.arrivals import Arrival
from tandem.types.errors import UserError

_REQUEST_STRIDE = 2**24
"""Between the token ids of two requests, so that no two have a block in common but those that share a prefix."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """The options of ``EngineSettings`` that scheduling depends on, by the same names. ``window``: of the widest layer's attention, 0 without.
    ``state_snapshots``: ``None`` for a model without linear attention."""

    num_blocks: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    admission: str = "chunked"
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    max_prefill_slowdown: float | None = None
    window: int = 0
    state_snapshots: int | None = None


@dataclass(slots=True)
class ServedRequest:
    """One request, in seconds of the simulated clock. ``tokens``: drawn so far."""

    arrival: Arrival
    first_token_s: float = 0.0
    finished_s: float = 0.0
    tokens: int = 0

    @property
    def latency_s(self) -> float:
        return self.finished_s - self.arrival.at_s

    @property
    def time_to_first_token_s(self) -> float:
        return self.first_token_s - self.arrival.at_s

    @property
    def time_per_output_token_s(self) -> float:
        return (self.finished_s - self.first_token_s) / max(1, self.arrival.output_tokens - 1)


@dataclass(slots=True)
class Simulation:
    """What a simulation found. ``seconds``: until the last request had ended. ``outputs``: the decisions of the scheduler, if they were asked for."""

    requests: list[ServedRequest]
    seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0
    most_running: int = 0
    cached_prompt_tokens: int = 0
    outputs: list[SchedulerOutput] = field(default_factory=list)

    @property
    def output_tokens_per_s(self) -> float:
        return sum(request.arrival.output_tokens for request in self.requests) / self.seconds if self.seconds else 0.0

    def median(self, name: str) -> float:
        """Returns the median of ``latency_s``, ``time_to_first_token_s`` or ``time_per_output_token_s``."""
        return float(statistics.median(getattr(request, name) for request in self.requests))

    def quantile(self, name: str, share: float) -> float:
        """Returns the smallest value that ``share`` of the requests do not exceed."""
        values = sorted(getattr(request, name) for request in self.requests)
        return float(values[min(len(values) - 1, int(share * len(values)))])


def simulate(
    arrivals: Sequence[Arrival], engine: SimulatedEngine, step_seconds: Callable[[EngineStep], float], *, request_s: float = 0.0, records: bool = False
) -> Simulation:
    """Returns what ``engine`` does with ``arrivals``. ``step_seconds``: of a step, predicted or measured; ``request_s``: of queueing a request and returning
    its output. ``records``: keep every ``SchedulerOutput``. Raises ``UserError`` for a request that the cache cannot hold."""
    return _Run(engine, step_seconds, request_s, records).run(sorted(arrivals, key=lambda arrival: arrival.at_s))


class _Run:
    def __init__(self, engine: SimulatedEngine, step_seconds: Callable[[EngineStep], float], request_s: float, records: bool) -> None:
        self.engine, self.step_seconds, self.request_s, self.records = engine, step_seconds, request_s, records
        first, snapshots = engine.max_num_seqs, engine.state_snapshots
        states = None if snapshots is None else StateRows(range(first, first + snapshots), 0)
        self.kv_cache = KVCacheManager(engine.num_blocks, enable_prefix_caching=engine.enable_prefix_caching, window=engine.window, states=states)
        self.budget = None if engine.max_prefill_slowdown is None else PrefillBudget(engine.max_prefill_slowdown)
        config = SchedulerConfig(engine.max_num_seqs, engine.max_num_batched_tokens, engine.admission, int(engine.watermark * engine.num_blocks))
        self.scheduler = Scheduler(config, self.kv_cache, self._read_back, prefill_budget=self.budget)
        self.served: dict[EngineSequence, ServedRequest] = {}
        self.now = 0.0

    def run(self, arrivals: Sequence[Arrival]) -> Simulation:
        found, waiting = Simulation([ServedRequest(arrival) for arrival in arrivals]), 0
        for arrival in arrivals:
            self._check(arrival)
        while waiting < len(arrivals) or self.served:
            if not self.served:
                self.now = max(self.now, arrivals[waiting].at_s)
            while waiting < len(arrivals) and arrivals[waiting].at_s <= self.now:
                self._add(waiting, found.requests[waiting])
                waiting += 1
            output = self.scheduler.schedule()
            if output.has_work:
                self._compute(output, found)
        found.seconds = self.now
        return found

    def _check(self, arrival: Arrival) -> None:
        length = arrival.prompt_tokens + arrival.output_tokens
        if blocks_for(length) > self.engine.num_blocks:
            raise UserError(f"a request has {length:,} tokens and the KV cache {self.engine.num_blocks} blocks; it needs {blocks_for(length)}")
        if self.engine.admission != "chunked" and arrival.prompt_tokens > self.engine.max_num_batched_tokens:
            raise UserError(
                f"a prompt has {arrival.prompt_tokens:,} tokens and a step at most {self.engine.max_num_batched_tokens:,}; raise max_num_batched_tokens, or "
                "split prompts"
            )

    def _add(self, number: int, request: ServedRequest) -> None:
        arrival, own = request.arrival, (number + 1) * _REQUEST_STRIDE
        prompt = [index if index < arrival.shared_tokens else own + index for index in range(arrival.prompt_tokens)]
        engine_request = Request(
            str(number), None, prompt, SamplingParams(max_tokens=arrival.output_tokens), 0, number, number,
            max_length=arrival.prompt_tokens + arrival.output_tokens,
        )  # fmt: skip
        sequence = EngineSequence(engine_request, 0, random_key(0, number, 0))
        self.served[sequence] = request
        self.scheduler.add_group([sequence])
        self.now += self.request_s

    def _compute(self, output: SchedulerOutput, found: Simulation) -> None:
        running = self.scheduler.running.by_row
        drawing = [running[row] for row in output.decode_rows + output.joined_rows]
        seconds = self.step_seconds(self._step_of(output))
        self.now += seconds
        prompt_tokens = output.total_num_scheduled_tokens - len(output.decode_rows)
        if self.budget is not None:
            self.budget.observe(len(output.decode_rows), prompt_tokens, seconds)
        found.steps, found.preemptions = found.steps + 1, found.preemptions + len(output.preempted)
        found.most_running = max(found.most_running, len(running))
        if self.records:
            found.outputs.append(output)
        ended = []
        for sequence in drawing:
            request = self.served[sequence]
            request.tokens += 1
            request.first_token_s = request.first_token_s or self.now
            if request.tokens == request.arrival.output_tokens:
                ended.append(sequence)
        self.scheduler.finish(ended)
        for sequence in ended:
            move(sequence, Transition.BUDGET_STOP, self.scheduler.counts)
            found.cached_prompt_tokens += max(0, sequence.num_cached_tokens)
            self.served.pop(sequence).finished_s = self.now

    def _step_of(self, output: SchedulerOutput) -> EngineStep:
        step, running = self.scheduler.step, self.scheduler.running.by_row
        decoding = len(output.decode_rows)
        context = sum(running[row].offset + step + 1 for row in output.decode_rows) / decoding if decoding else 0.0
        prompt = sum(len(chunk.tokens) for chunk in output.prefills)
        attended = sum(len(chunk.tokens) * (chunk.start + len(chunk.tokens) / 2) for chunk in output.prefills)
        return EngineStep(decoding, context, prompt, attended / prompt if prompt else 0.0)

    def _read_back(self, sequences: list[EngineSequence]) -> None:
        for sequence in sequences:
            own = -(int(sequence.request.id) + 1) * _REQUEST_STRIDE
            sequence.token_ids.extend(own - index for index in range(len(sequence.token_ids), self.served[sequence].tokens))
