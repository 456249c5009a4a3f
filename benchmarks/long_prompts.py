"""What streams notice of long prompts that are computed beside them.

16 streams of `tandem serve` with one thread, a model of random parameters; the client has the other core. The time between two tokens of a stream, first while
nothing else runs, then while prompts of 4,096 tokens (none seen before) are computed one after another, each answered with one token. Servers: as it is by
default, which limits the prompt tokens of a step from measured times (`--max-prefill-slowdown 1.7`), and with fixed token budgets only. The ratio is the p99
beside prompts over the p99 alone, of one server.

    python benchmarks/long_prompts.py [--prompts 3] [--out benchmarks/results]
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from machine import machine, write_report
from serving import ready

from tandem.config.model import NewModelConfig
from tandem.model.create_model import create_model
from tandem.runtime.process.processes import Threads

STREAMS, PROMPT, ALONE_TOKENS, LONG = 16, 32, 200, 4096
MODEL = NewModelConfig(
    hidden_size=384, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2, head_dim=64, intermediate_size=1024,
    max_position_embeddings=16384
)  # fmt: skip
SERVERS = {
    "default (slowdown 1.7)": [],
    "slowdown 3": ["--max-prefill-slowdown", "3"],
    "512 tokens a step": ["--max-prefill-slowdown", "1000", "--max-num-batched-tokens", "512"],
    "4,096 tokens a step": ["--max-prefill-slowdown", "1000"],
}


@dataclass
class Measured:
    """Seconds between tokens ``alone`` and ``beside`` prompts, and to the first token of each long prompt."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)


def main() -> None:
    """Write one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3, help="long prompts, one after another")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the report goes")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        create_model(MODEL, 0, folder)
        for name, flags in SERVERS.items():
            rows.append((name, measure(folder, Path(work) / "serve.log", flags, options.prompts)))
    lines = ["# What streams notice of long prompts", "", machine(), "", __doc__.split("\n\n")[1], ""]
    lines += [
        "| server | between tokens alone, ms p50 / p99 | beside prompts, ms p50 / p99 | p99 ratio | first token of a long prompt, s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in rows:
        (low, high), (middle, worst) = percentiles(found.alone), percentiles(found.beside)
        lines.append(
            f"| {name} | {low:.1f} / {high:.1f} | {middle:.1f} / {worst:.1f} | {worst / high:.2f} | {statistics.median(found.first_token):.1f} |"
        )
    print("\n".join(lines))
    print(f"wrote {write_report('long-prompts', chr(10).join(lines), options.out)}")


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    return 1e3 * statistics.median(ordered), 1e3 * ordered[int(0.99 * (len(ordered) - 1))]


def measure(folder: Path, log: Path, flags: list[str], prompts: int) -> Measured:
    command = [str(Path(sys.executable).with_name("tandem")), "serve", str(folder), "--port", "0", "--threads", "1", "--max-num-seqs", "32"]
    with log.open("wb") as sink:
        server = subprocess.Popen(command + flags, stderr=sink, env={**os.environ, **Threads(1).environment()})
    try:
        return asyncio.run(ask(ready(server, log), prompts))
    finally:
        server.terminate()
        server.wait()


async def ask(url: str, prompts: int) -> Measured:
    found, phase, ended = Measured(), ["warm"], asyncio.Event()
    draw = torch.Generator().manual_seed(0)
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def stream(enough: asyncio.Event) -> None:
            body = {"prompt": torch.randint(3, 90, (PROMPT,), generator=draw).tolist(), "max_tokens": 12000, "ignore_eos": True, "stream": True}
            tokens, last = 0, 0.0
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if phase[0] != "warm" and last:
                        (found.alone if phase[0] == "alone" else found.beside).append(now - last)
                    tokens, last = tokens + 1, now
                    if tokens == ALONE_TOKENS:
                        enough.set()
                    if ended.is_set():
                        return

        async def long_prompt() -> None:
            body = {"prompt": torch.randint(3, 90, (LONG,), generator=draw).tolist(), "max_tokens": 1, "ignore_eos": True}
            began = time.perf_counter()
            (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
            found.first_token.append(time.perf_counter() - began)

        warm = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(stream(enough)) for enough in warm]
        await asyncio.gather(*(enough.wait() for enough in warm))
        # The first long prompt compiles and measures.
        await long_prompt()
        found.first_token.clear()
        phase[0] = "alone"
        while len(found.alone) < ALONE_TOKENS * STREAMS:
            await asyncio.sleep(0.05)
        phase[0] = "beside"
        for _ in range(prompts):
            await long_prompt()
        ended.set()
        await asyncio.gather(*streams)
    return found


if __name__ == "__main__":
    main()
