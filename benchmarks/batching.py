"""Every kind of batching and of KV cache on one workload: throughput, latency, time to first token, padding and KV waste.

    python benchmarks/batching.py [--requests 96] [--rounds 3] [--threads 1]

One model of 3.7M parameters with random weights, one cache. Requests of 16 to 128 prompt tokens and 8 to 256 new ones (most short, a
few long) arrive over the first quarter of the run. All settings take turns; the clock is CPU time of the process, which stands still
while it waits for a core, and jumps where nothing is there to do. Padding is counted, not computed: the column ``padded`` says what
would be left of the throughput if it were.
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from machine import HERE, machine, write_ratios, write_report

from tandem.engine.engine import Engine
from tandem.engine.sample.sampling_params import RequestOutputKind, SamplingParams
from tandem.engine.settings import EngineSettings
from tandem.kernels import select
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.initialise import initialise

SHAPES = ModelShapes(
    architecture="qwen3", vocab_size=2048, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
    intermediate_size=768,
    max_position_embeddings=512, tie_word_embeddings=True, qk_norm=True,
)
ADMISSIONS = ("static", "dynamic", "continuous", "chunked")
CACHES = ("static", "paged")
CACHE_TOKENS = 16 * SHAPES.max_position_embeddings
Request = tuple[float, int, int]
"""Arrival in seconds, prompt tokens, new tokens."""


def workload(count: int, span_s: float) -> list[Request]:
    rng = random.Random(0)
    return [
        (span_s * i / count, rng.randrange(16, 129), min(256, 8 + int(rng.expovariate(1 / 90)))) for i in range(count)
    ]


def measure(admission: str, cache: str, requests: list[Request]) -> dict[str, float]:
    decoder = Decoder(SHAPES, select("auto"))
    initialise(decoder, 0)
    settings = EngineSettings(
        SHAPES.max_position_embeddings, CACHE_TOKENS // 16, max_num_seqs=64, max_num_batched_tokens=1024, admission=admission,
        cache_implementation=cache, enable_prefix_caching=False,
    )
    engine = Engine(decoder, settings)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    waiting, most, skipped, began = list(requests), 0, 0.0, time.process_time()
    while waiting or engine.has_unfinished_requests:
        now = time.process_time() - began + skipped
        if not engine.has_unfinished_requests and waiting[0][0] > now:
            skipped += waiting[0][0] - now
            now = waiting[0][0]
        while waiting and waiting[0][0] <= now:
            number = len(requests) - len(waiting)
            _, prompt, new = waiting.pop(0)
            tokens = [(7 * number + i) % SHAPES.vocab_size for i in range(prompt)]
            engine.add_request(str(number), tokens, SamplingParams(max_tokens=new, seed=number, output_kind=RequestOutputKind.DELTA))
        for output in engine.step():
            now = time.process_time() - began + skipped
            first.setdefault(output.request_id, now)
            if output.finished:
                last[output.request_id] = now
        most = max(most, sum(sequences for state, sequences in engine.counts().items() if state in ("decoding", "prefilling")))
    taken = time.process_time() - began
    figures = engine.cumulative_stats()
    delays, whole = (sorted(at[str(i)] - arrival for i, (arrival, _, _) in enumerate(requests)) for at in (first, last))
    nearly_last = int(0.99 * (len(requests) - 1))
    return {
        "tokens_per_s": figures.drawn_tokens / taken,
        "first_token_s": statistics.median(delays),
        "first_token_p99_s": delays[nearly_last],
        "latency_s": statistics.median(whole),
        "latency_p99_s": whole[nearly_last],
        "padding": figures.padding,
        "kv_waste": figures.kv_waste,
        "at_once": float(most),
        "steps": float(figures.steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    described = machine()
    options.work.mkdir(parents=True, exist_ok=True)
    alone = measure("chunked", "paged", workload(options.requests, 0.0))
    total = sum(new for _, _, new in workload(options.requests, 0.0))
    requests = workload(options.requests, 0.25 * total / alone["tokens_per_s"])
    kinds = list(itertools.product(ADMISSIONS, CACHES))
    found: dict[tuple[str, str], list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            found[kind].append(measure(*kind, requests))
            print(kind, found[kind][-1], file=sys.stderr, flush=True)
    best = {kind: max(rounds, key=lambda r: r["tokens_per_s"]) for kind, rounds in found.items()}
    base = best["static", "static"]["tokens_per_s"]
    lines = []
    for (batching, kv), b in best.items():
        lines.append(
            f"| {batching} | {kv} | {b['tokens_per_s']:,.0f} | {b['tokens_per_s'] / base:.2f} | {b['tokens_per_s'] * (1 - b['padding']):,.0f} | "
            f"{1000 * b['first_token_s']:,.0f} | {1000 * b['first_token_p99_s']:,.0f} | "
            f"{1000 * b['latency_s']:,.0f} | {1000 * b['latency_p99_s']:,.0f} | {b['padding']:.1%} | {b['kv_waste']:.1%} | "
            f"{b['at_once']:.0f} | {b['steps']:,.0f} |"
        )
    about = (
        f"{options.requests} requests of 16 to 128 prompt tokens and 8 to 256 new ones over the first quarter of the run; "
        f"{parameter_count(SHAPES) / 1e6:.1f}M parameters, {CACHE_TOKENS:,} tokens of cache, at most 64 sequences, {options.threads} "
        f"thread; the best of {options.rounds} interleaved rounds, CPU time. `padded`: throughput if a static batch's padding were "
        "computed too, which here is only counted. A whole request: "
        "from its arrival to its last token. KV waste: the share of the slots given to sequences that hold nothing."
    )
    header = (
        "| batching | kv | tokens / CPU s | ratio | padded | first token ms, median | 99th percentile | whole request ms, median | "
        "99th percentile | padding | KV waste | at once | steps |"
    )
    text = "\n".join(["# Kinds of batching and of KV cache", "", f"{described}\n\n{about}", "", header, "|---" * 13 + "|", *lines])
    print(text)
    print(f"wrote {write_report('batching', text, options.out)}")
    paged = best["chunked", "paged"]
    write_ratios(
        "batching",
        [
            {"what": "throughput, chunked over paged beside static over static", "ratio": paged["tokens_per_s"] / base, "target": 1.0},
            {"what": "paged KV waste, as a share of the 5% allowed", "ratio": 0.05 / max(paged["kv_waste"], 1e-9), "target": 1.0},
        ],
        options.work,
    )


if __name__ == "__main__":
    main()
