"""The serving simulator beside the real engine: throughput and latency for three patterns of arrivals.

    python benchmarks/serving_simulator.py [--requests 160] [--rounds 3] [--load 0.6] [--drift 0.1]

One model of 3.7M parameters with random weights. The engine's steps are measured (decoding with several numbers of sequences, prompts of several lengths,
both with a longer context); the simulator then gets these times, the arrivals and the engine's options, and nothing of the run that it predicts. Requests
arrive at ``--load`` times the rate that it completes when all are queued at once. The clock is CPU time of the process, which stands still while it waits for a
core, and jumps where nothing is there to do.

CPU time does not stand still while another process slows the core down, by its other hardware thread, its caches or its clock. So steps are measured right
before and right after every run, the simulator gets the mean of both, and a run counts only if both agree within ``--drift``: the others say nothing about the
simulator, and are made again, whatever their figures are. The report has all rounds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from machine import HERE, machine, write_report

from tandem.engine.engine import Engine
from tandem.engine.sample.sampling_params import RequestOutputKind, SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.estimate.serving.step_time import EngineStep
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.initialise import initialise
from tandem.planner.serving.arrivals import PATTERNS, Arrival, Pattern, draw_arrivals
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
MEASURED = 2
"""Times that each kind of step is measured, before and after a run."""


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
    """Returns the mean of ``rounds`` measurements of each kind of step. Not the best or the median: a step that is slow because its caches were another
    process's meanwhile takes its time in the run that is predicted too."""
    driver = _Driver(engine)

    def decoding(sequences: int, context: int) -> float:
        for _ in range(sequences):
            driver.add(context, STEPS + 40)
        while any(engine.counts().get(state, 0) for state in ("waiting", "prefilling")):
            engine.step()
        mean_s = statistics.mean(driver.step_s() for _ in range(STEPS))
        driver.drain()
        return mean_s

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
        driver.add(PROMPTS[0], 1)
        queued = time.process_time() - began
        # A step that computes the prompt and returns the output, without the prompt.
        return queued + driver.step_s() - prompts[0][1]

    prompt(64)
    mean: Callable[[Callable[[], float]], float] = lambda measure: statistics.mean(measure() for _ in range(rounds))
    decode = tuple((float(size), mean(lambda size=size: decoding(size, SHORT))) for size in SEQUENCES)  # type: ignore[misc]
    many = SEQUENCES[-2]
    context_s = (mean(lambda: decoding(many, LONG)) - dict(decode)[many]) / many / (LONG - SHORT)
    prompts = tuple((float(size), mean(lambda size=size: prompt(size))) for size in PROMPTS)  # type: ignore[misc]
    budget = ENGINE.max_num_batched_tokens
    chunks = [second_chunk() for _ in range(rounds)]
    slope = statistics.mean(max(0.0, second - first) for first, second in chunks) / (budget - 16) / budget
    returned = statistics.mean(request() for _ in range(5 * rounds))
    return MeasuredSteps(decode, SHORT + STEPS / 2, max(0.0, context_s), prompts, slope, max(0.0, returned))


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


class Round(NamedTuple):
    """A run of the engine, what was simulated for it, and how much longer steps took after it than before, as a share."""

    simulated: Simulation
    measured: Simulation
    drift: float


def mean_steps(before: MeasuredSteps, after: MeasuredSteps) -> MeasuredSteps:
    """Returns the mean of two measurements."""
    points = lambda one, other: tuple((size, (a + b) / 2) for (size, a), (_, b) in zip(one, other, strict=True))
    return MeasuredSteps(
        points(before.decode_s, after.decode_s), before.decode_context, (before.context_s + after.context_s) / 2, points(before.prompt_s, after.prompt_s),
        (before.prompt_context_s + after.prompt_context_s) / 2, (before.request_s + after.request_s) / 2,
    )  # fmt: skip


def usual_seconds(steps: MeasuredSteps) -> float:
    """Returns the seconds of what a request takes at a usual load: its prompt, and its share of steps of four sequences."""
    return steps(EngineStep(prompt_tokens=PROMPT, prompt_context=PROMPT / 2)) + OUTPUT / 4 * steps(EngineStep(4, PROMPT + OUTPUT / 2))


def run_round(engine: Engine, pattern: Pattern, requests: int, load: float, seed: int) -> Round:
    """Returns one run of ``pattern`` between two measurements of the engine's steps."""
    longest = SHAPES.max_position_embeddings
    before = measure_steps(engine, MEASURED)
    queued = [each._replace(at_s=0.0) for each in draw_arrivals("steady", requests, 1.0, PROMPT, OUTPUT, longest=longest)]
    rate = load * requests / simulate(queued, ENGINE, before, request_s=before.request_s).seconds
    arrivals = draw_arrivals(pattern, requests, rate, PROMPT, OUTPUT, seed=seed, longest=longest)
    engine.reset_prefix_cache()
    measured = run_engine(engine, arrivals)
    after = measure_steps(engine, MEASURED)
    steps = mean_steps(before, after)
    simulated = simulate(arrivals, ENGINE, steps, request_s=steps.request_s)
    return Round(simulated, measured, usual_seconds(after) / usual_seconds(before) - 1)


def compare(requests: int, rounds: int, load: float, drift: float, tries: int) -> tuple[list[tuple[str, str, float, float, float]], dict[str, list[Round]]]:
    """Returns (pattern, figure, simulated, measured, error), each the median of ``rounds`` rounds, and all rounds that were made, at most ``tries`` for a
    pattern. A pattern without a round that counts has no rows."""
    engine = make_engine()
    measure_steps(engine, 1)
    rows, made = [], dict[str, list[Round]]()
    for pattern in PATTERNS:
        made[pattern], counted = list[Round](), list[Round]()
        while len(counted) < rounds and len(made[pattern]) < tries:
            each = run_round(engine, pattern, requests, load, seed=1 + len(made[pattern]))
            made[pattern].append(each)
            counted += [each] if abs(each.drift) <= drift else []
            error = each.simulated.median("latency_s") / each.measured.median("latency_s") - 1
            print(f"{pattern}: drift {each.drift:+.0%}, median latency {error:+.0%}", file=sys.stderr, flush=True)
        for name, figure in FIGURES.items() if counted else ():
            simulated, measured = ([figure(getattr(each, side)) for each in counted] for side in ("simulated", "measured"))
            error = statistics.median(guess / value - 1 for guess, value in zip(simulated, measured, strict=True))
            rows.append((pattern, name, statistics.median(simulated), statistics.median(measured), error))
    return rows, made


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
    parser.add_argument("--drift", type=float, default=0.1, help="how much steps may change in a round that counts (default: 0.1)")
    parser.add_argument("--tries", type=int, default=12, help="rounds of a pattern that are made at most (default: 12)")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    described = machine()
    rows, made = compare(options.requests, options.rounds, options.load, options.drift, options.tries)
    lines = [f"| {pattern} | {name} | {guess:.4g} | {value:.4g} | {error:+.0%} |" for pattern, name, guess, value, error in rows]
    about = (
        f"{options.requests} requests with lognormal lengths of {PROMPT} + {OUTPUT} tokens on average, at {options.load} of the rate that the engine "
        f"completes when all are queued; 3.7M parameters, one thread, CPU time. Medians of {options.rounds} rounds, between the measurements of which steps "
        f"changed by at most {options.drift:.0%}; the error is the median of the rounds' errors."
    )
    header = ["| arrivals | figure | simulated | measured | error |", "| --- | --- | --- | --- | --- |"]
    every = ["", "All rounds, also those that do not count: the change of steps between the two measurements / the error of the median latency.", ""]
    for pattern, rounds in made.items():
        errors = [(each.drift, each.simulated.median("latency_s") / each.measured.median("latency_s") - 1) for each in rounds]
        every.append(f"- {pattern}: " + ", ".join(f"{change:+.0%} / {error:+.0%}" for change, error in errors))
    text = "\n".join(["# The serving simulator and the engine", "", described, "", about, "", *header, *lines, *every])
    print(text)
    print(f"wrote {write_report('serving-simulator', text, options.out)}")


if __name__ == "__main__":
    main()
