"""The serving simulator beside the real engine: throughput and latency for three patterns of arrivals.

    python benchmarks/serving_simulator.py [--requests 160] [--rounds 3] [--load 0.6]

One model of 3.7M parameters with random weights. The engine's steps are measured first (decoding with several numbers of sequences, prompts of several
lengths, both with a longer context); the simulator then gets these times, the arrivals and the engine's options, and nothing of the run that it predicts.
Requests arrive at ``--load`` times the rate that the engine completes when all are queued at once. The clock is CPU time of the process, which stands
still while it waits for a core, and jumps where nothing is there to do.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import HERE, machine, write_report

from tandem.engine.engine import Engine
from tandem.engine.sample.sampling_params import RequestOutputKind, SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.initialise import initialise
from tandem.planner.serving.arrivals import PATTERNS, Arrival, draw_arrivals
from tandem.planner.serving.measured_steps import MeasuredSteps
from tandem.planner.serving.simulator import ServedRequest, SimulatedEngine, Simulation, simulate

SHAPES = ModelShapes(
    architecture="qwen3", vocab_size=2048, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
    intermediate_size=768, max_position_embeddings=1024, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip
ENGINE = SimulatedEngine(num_blocks=2048, max_num_seqs=64, max_num_batched_tokens=512)
PROMPT, OUTPUT = 96, 48
SEQUENCES, PROMPTS = (1, 2, 4, 8, 16, 32, 64), (16, 64, 128, 256, 512)
SHORT, LONG = 32, 512
"""Tokens of context between which the cost of a further one is measured."""
STEPS = 12


def make_engine() -> Engine:
    decoder = Decoder(SHAPES, select("auto"))
    initialise(decoder, 0)
    settings = EngineSettings(
        SHAPES.max_position_embeddings, ENGINE.num_blocks, max_num_seqs=ENGINE.max_num_seqs, max_num_batched_tokens=ENGINE.max_num_batched_tokens,
        admission=ENGINE.admission, enable_prefix_caching=ENGINE.enable_prefix_caching, watermark=ENGINE.watermark,
    )  # fmt: skip
    return Engine(decoder, settings)


class _Driver:
    """Adds requests with prompts of their own to one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.count = engine, 0

    def add(self, prompt: int, output: int) -> str:
        self.count += 1
        tokens = [(self.count * 7919 + i * (self.count % 13 + 1)) % SHAPES.vocab_size for i in range(prompt)]
        params = SamplingParams(max_tokens=output, seed=self.count, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        self.engine.add_request(str(self.count), tokens, params)
        return str(self.count)

    def step_s(self) -> float:
        began = time.process_time()
        self.engine.step()
        return time.process_time() - began

    def drain(self) -> None:
        while self.engine.has_unfinished_requests:
            self.engine.step()


def measure_steps(engine: Engine, rounds: int = 3) -> MeasuredSteps:
    """Returns the best of ``rounds`` measurements of each kind of step."""
    driver = _Driver(engine)

    def decoding(sequences: int, context: int) -> float:
        for _ in range(sequences):
            driver.add(context, STEPS + 40)
        while any(engine.counts().get(state, 0) for state in ("waiting", "prefilling")):
            engine.step()
        found = statistics.median(driver.step_s() for _ in range(STEPS))
        driver.drain()
        return found

    def prompt(tokens: int) -> float:
        driver.add(tokens, 2)
        found = driver.step_s()
        driver.drain()
        return found

    def second_chunk() -> tuple[float, float]:
        driver.add(2 * ENGINE.max_num_batched_tokens - 16, 2)
        first, second = driver.step_s(), driver.step_s()
        driver.drain()
        return first, second

    def request() -> float:
        began = time.process_time()
        for _ in range(32):
            driver.add(PROMPT, 1)
        queued = time.process_time() - began
        driver.drain()
        return queued / 32

    prompt(64)
    best: Callable[[Callable[[], float]], float] = lambda measure: statistics.median(measure() for _ in range(rounds))
    decode = tuple((float(size), best(lambda size=size: decoding(size, SHORT))) for size in SEQUENCES)  # type: ignore[misc]
    many = SEQUENCES[-2]
    context_s = (best(lambda: decoding(many, LONG)) - dict(decode)[many]) / many / (LONG - SHORT)
    prompts = tuple((float(size), best(lambda size=size: prompt(size))) for size in PROMPTS)  # type: ignore[misc]
    budget = ENGINE.max_num_batched_tokens
    chunks = [second_chunk() for _ in range(rounds)]
    slope = statistics.median(max(0.0, second - first) for first, second in chunks) / (budget - 16) / budget
    return MeasuredSteps(decode, SHORT + STEPS / 2, max(0.0, context_s), prompts, slope, best(request))


def run_engine(engine: Engine, arrivals: list[Arrival]) -> Simulation:
    """Returns what the real engine does with ``arrivals``, in the form of the simulator."""
    driver, found, by_id, waiting, skipped = _Driver(engine), Simulation([ServedRequest(each) for each in arrivals]), dict[str, ServedRequest](), 0, 0.0
    driver.count = 10**6
    began = time.process_time()
    while waiting < len(arrivals) or engine.has_unfinished_requests:
        now = time.process_time() - began + skipped
        if not engine.has_unfinished_requests and arrivals[waiting].at_s > now:
            skipped += arrivals[waiting].at_s - now
            now = arrivals[waiting].at_s
        while waiting < len(arrivals) and arrivals[waiting].at_s <= now:
            by_id[driver.add(arrivals[waiting].prompt_tokens, arrivals[waiting].output_tokens)] = found.requests[waiting]
            waiting += 1
        outputs = engine.step()
        now = time.process_time() - began + skipped
        found.steps += 1
        for output in outputs:
            request = by_id[output.request_id]
            request.first_token_s = request.first_token_s or now
            if output.finished:
                request.finished_s = now
    found.seconds = time.process_time() - began + skipped
    return found


def compare(requests: int, rounds: int, load: float) -> list[tuple[str, str, float, float]]:
    """Returns (pattern, figure, simulated, measured), each measured figure the median of ``rounds``."""
    engine = make_engine()
    steps = measure_steps(engine)
    longest = SHAPES.max_position_embeddings
    queued = [each._replace(at_s=0.0) for each in draw_arrivals("steady", requests, 1.0, PROMPT, OUTPUT, longest=longest)]
    rate = load * requests / run_engine(engine, queued).seconds
    rows = []
    for pattern in PATTERNS:
        arrivals = draw_arrivals(pattern, requests, rate, PROMPT, OUTPUT, seed=1, longest=longest)
        simulated = simulate(arrivals, ENGINE, steps, request_s=steps.request_s)
        measured = []
        for _ in range(rounds):
            engine.reset_prefix_cache()
            measured.append(run_engine(engine, arrivals))
        for name, figure in FIGURES.items():
            rows.append((pattern, name, figure(simulated), statistics.median(map(figure, measured))))
            print(*rows[-1], file=sys.stderr, flush=True)
    return rows


FIGURES: dict[str, Callable[[Simulation], float]] = {
    "output tokens / s": lambda run: run.output_tokens_per_s,
    "latency s, median": lambda run: run.median("latency_s"),
    "first token s, median": lambda run: run.median("time_to_first_token_s"),
    "latency s, 90th percentile": lambda run: run.quantile("latency_s", 0.9),
    "steps": lambda run: float(run.steps),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    described = machine()
    lines = [f"| {pattern} | {name} | {guess:.4g} | {value:.4g} | {guess / value - 1:+.0%} |" for pattern, name, guess, value in compare(
        options.requests, options.rounds, options.load
    )]  # fmt: skip
    about = (
        f"{options.requests} requests with lognormal lengths of {PROMPT} + {OUTPUT} tokens on average, at {options.load} of the rate that the engine "
        f"completes when all are queued; 3.7M parameters, one thread; the median of {options.rounds} runs, CPU time."
    )
    header = ["| arrivals | figure | simulated | measured | error |", "| --- | --- | --- | --- | --- |"]
    text = "\n".join(["# The serving simulator and the engine", "", described, "", about, "", *header, *lines])
    print(text)
    print(f"wrote {write_report('serving-simulator', text, options.out)}")


if __name__ == "__main__":
    main()
