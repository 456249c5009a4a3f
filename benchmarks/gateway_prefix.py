"""What routing by prefix saves.

Four real engines (`tandem serve`, random parameters, a thread each) behind `tandem gateway`, on the cores of one machine, which also run the client. Each KV
pool holds three of eight system prompts of 1,024 tokens, drawn by Zipf's law; a request adds 64 tokens of its own and asks for 8. The same requests in the
same order, twelve at a time, with `balance: round_robin`, and with `router.prefix: 1` and `--kv-events`. Prefilled tokens are those that the engines counted
(prompt tokens less hits of the prefix cache). Prefill's part of the time is the engines' own: from first step to first token, of that and from first to last.

Then without shared beginnings: every prompt its own, `least_tokens` and `router.prefix: 1`. The two ways take turns, after one run that does not count; ratios
are those of the medians of the rounds. Tokens for each CPU second of the engines do not depend on what else the machine does.

    python benchmarks/gateway_prefix.py [--requests 160] [--rounds 3] [--out benchmarks/results]
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from machine import machine, write_report

from tandem.config.model import NewModelConfig
from tandem.model.create_model import create_model

ENGINES, SYSTEMS, SYSTEM_TOKENS, OWN_TOKENS, NEW_TOKENS, AT_ONCE = 4, 8, 1024, 64, 8, 12
POOL_TOKENS = 3 * SYSTEM_TOKENS + 4 * (OWN_TOKENS + 32)
"""Three system prompts, and what four running requests add."""
MODEL = NewModelConfig(
    hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=768,
    max_position_embeddings=2048
)  # fmt: skip
VOCABULARY = 90


@dataclass
class Measured:
    """One run over all requests. ``cpu_s``: of the engines. ``prefill_share``: of the engines' time for requests."""

    seconds: float
    cpu_s: float
    prompt_tokens: float
    prefilled_tokens: float
    output_tokens: float
    prefill_share: float

    @property
    def rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def cpu_rate(self) -> float:
        return self.output_tokens / self.cpu_s


def main() -> None:
    """Write one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=160, help="requests of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the report goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        model = Path(work) / "model"
        create_model(MODEL, 0, model)
        engines = [stack.enter_context(engine(model, Path(work), number)) for number in range(ENGINES)]
        ways = {"round_robin": {"balance": "round_robin"}, "prefix": {"router": {"prefix": 1}}, "least_tokens": {}}
        shared: dict[str, list[Measured]] = {"round_robin": [], "prefix": []}
        apart: dict[str, list[Measured]] = {"least_tokens": [], "prefix": []}
        # What starts late in a process is in no figure.
        measure(engines, Path(work), ways["round_robin"], shared_prompts(4 * AT_ONCE, options.rounds))
        for seed in range(options.rounds):
            # In turn, so that a slow minute of the machine is in both.
            for found, prompts in ((shared, shared_prompts(options.requests, seed)), (apart, own_prompts(options.requests // 4, seed))):
                for name, runs in found.items():
                    runs.append(measure(engines, Path(work), ways[name], prompts))
    print(write_report("gateway-prefix", report(options.requests, options.rounds, shared, apart), options.out))


def shared_prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    systems = [random.Random(-number - 1).choices(range(3, VOCABULARY), k=SYSTEM_TOKENS) for number in range(SYSTEMS)]
    chosen = draw.choices(systems, weights=[1 / (rank + 1) for rank in range(SYSTEMS)], k=count)
    return [[*system, *(draw.randrange(3, VOCABULARY) for _ in range(OWN_TOKENS))] for system in chosen]


def own_prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(1000 + seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(SYSTEM_TOKENS + OWN_TOKENS)] for _ in range(count)]


@contextmanager
def running(arguments: list[str], log: Path, says: str) -> Iterator[tuple[str, psutil.Process]]:
    """Runs ``tandem ARGUMENTS`` and gives its URL, once it writes ``says`` and that, and its process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as sink, subprocess.Popen([sys.executable, "-m", "tandem", *arguments], stdout=sink, stderr=sink, env=environment) as process:
        try:
            while not (found := re.search(rf"{says}(http://\S+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            while httpx.get(f"{found[1]}/readiness").status_code != 200:
                time.sleep(0.05)
            yield found[1], psutil.Process(process.pid)
        finally:
            process.terminate()


@contextmanager
def engine(model: Path, work: Path, number: int) -> Iterator[tuple[str, psutil.Process]]:
    options = ["--port", "0", "--threads", "1", "--served-model-name", "m", "--kv-events", "--kv-cache-tokens", str(POOL_TOKENS), "--max-model-len", "1280",
               "--max-num-seqs", "4", "--control-key", "control", "--disable-uvicorn-access-log", "--disable-log-stats"]  # fmt: skip
    with running(["serve", str(model), *options], work / f"serve-{number}.log", "") as started:
        yield started


def measure(engines: list[tuple[str, psutil.Process]], work: Path, settings: dict[str, Any], prompts: list[list[int]]) -> Measured:
    """Returns what one run over ``prompts`` through a gateway with ``settings`` takes, from empty caches."""
    urls = [url for url, _ in engines]
    for url in urls:
        httpx.post(f"{url}/reset_prefix_cache", headers={"Authorization": "Bearer control"}).raise_for_status()
    file = work / "gateway.yaml"
    file.write_text(json.dumps({"backends": [{"url": url} for url in urls], "port": 0, "log_requests": False, "probes": {"state_s": 0.1}, **settings}))
    before = [counters(url) for url in urls]
    with running(["gateway", str(file)], work / "gateway.log", "gateway at ") as (gateway, _):
        began, cpu_s = time.monotonic(), used_cpu_s(engines)
        output = asyncio.run(load(gateway, prompts))
        seconds, cpu_s = time.monotonic() - began, used_cpu_s(engines) - cpu_s
    after = [counters(url) for url in urls]
    added = {name: sum(b[name] - a[name] for a, b in zip(before, after, strict=True)) for name in before[0]}
    prefill, decode = added["vllm:request_prefill_time_seconds_sum"], added["vllm:request_decode_time_seconds_sum"]
    prompt = added["vllm:prompt_tokens_total"]
    return Measured(seconds, cpu_s, prompt, prompt - added["vllm:prefix_cache_hits_total"], output, prefill / (prefill + decode))


def used_cpu_s(engines: list[tuple[str, psutil.Process]]) -> float:
    return sum(sum(each.cpu_times()[:2]) for _, first in engines for each in [first, *first.children(recursive=True)])


def counters(url: str) -> dict[str, float]:
    names = ("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total", "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum")
    lines = [line.rpartition(" ") for line in httpx.get(f"{url}/metrics").text.splitlines()]
    return {name: sum(float(value) for key, _, value in lines if key.partition("{")[0] == name) for name in names}


async def load(gateway: str, prompts: list[list[int]]) -> int:
    """Sends all prompts, ``AT_ONCE`` at a time; returns the tokens of the answers."""
    waiting = iter(prompts)
    total = 0
    async with httpx.AsyncClient(timeout=600) as client:

        async def ask() -> None:
            nonlocal total
            for prompt in waiting:
                body = {"model": "m", "prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0}
                response = await client.post(f"{gateway}/v1/completions", json=body)
                response.raise_for_status()
                total += response.json()["usage"]["completion_tokens"]

        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    return total


def report(requests: int, rounds: int, shared: dict[str, list[Measured]], apart: dict[str, list[Measured]]) -> str:
    def middle(runs: list[Measured], name: str) -> float:
        return statistics.median(getattr(run, name) for run in runs)

    rows = [
        f"| {title} | {way} | {middle(runs, 'prefilled_tokens'):,.0f} of {middle(runs, 'prompt_tokens'):,.0f} "
        f"| {middle(runs, 'rate'):.1f} | {middle(runs, 'cpu_rate'):.1f} | {middle(runs, 'prefill_share'):.0%} |"
        for title, group in (("eight system prompts", shared), ("no shared beginnings", apart)) for way, runs in group.items()
    ]  # fmt: skip
    prefilled = sum(run.prefilled_tokens for run in shared["prefix"]) / sum(run.prefilled_tokens for run in shared["round_robin"])
    faster = [middle(shared["prefix"], name) / middle(shared["round_robin"], name) for name in ("rate", "cpu_rate")]
    same = [middle(apart["prefix"], name) / middle(apart["least_tokens"], name) for name in ("rate", "cpu_rate")]
    return "\n".join([
        "# Routing by prefix", "", (__doc__ or "").split("\n    python")[0].strip(), "",
        f"{machine()}. {requests} requests a run with system prompts, {requests // 4} without, {rounds} runs of each; medians.", "",
        "| prompts | routing | prefilled tokens | output tokens/s | / CPU s of the engines | prefill's part of the time |",
        "| --- | --- | ---: | ---: | ---: | ---: |", *rows, "",
        f"Prefilled tokens: {prefilled:.2f} of round robin's (aim: at most 0.4). Output tokens a second: {faster[0]:.2f}x (aim: at least 1.8), "
        f"for each CPU second {faster[1]:.2f}x. Without shared beginnings: {same[0]:.2f} of least load (aim: at least 0.98), for each CPU second "
        f"{same[1]:.2f}.", "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
