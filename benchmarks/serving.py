"""What HTTP costs: the same work asked of the server and of the engine alone.

64 requests of 32 + 128 tokens, all at once, on a model of 3.2 million random parameters; the engine has one thread on each
side, and the two take turns. Whole answers, and streams. Figures are of the best round: output tokens for each CPU second of the
engine's process, its share of what the engine alone makes of one (the ratio), and CPU milliseconds of the listening process
for each request.

    python benchmarks/serving.py [--rounds 3] [--out benchmarks/results]
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import torch
from machine import machine, write_report

from tandem.config.model import NewModelConfig
from tandem.engine.llm import LLM
from tandem.engine.sample.sampling_params import SamplingParams
from tandem.model.create_model import create_model
from tandem.runtime.process.processes import Threads

REQUESTS, PROMPT, OUTPUT = 64, 32, 128
MODEL = NewModelConfig(
    hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=768,
    max_position_embeddings=512
)


def main() -> None:
    """Write one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the report goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        create_model(MODEL, 0, folder)
        llm = LLM(folder, max_num_seqs=REQUESTS)
        best = {"engine alone": (0.0, 0.0), "HTTP, whole answers": (0.0, 0.0), "HTTP, streams": (0.0, 0.0)}
        command = [str(Path(sys.executable).with_name("tandem")), "serve", str(folder), "--port", "0", "--threads", "1", "--max-num-seqs", str(REQUESTS)]
        log = Path(work) / "serve.log"
        with log.open("wb") as sink:
            server = subprocess.Popen(command, stderr=sink, env={**os.environ, **Threads(1).environment()})
        try:
            url = ready(server, log)
            (engine,) = psutil.Process(server.pid).children()
            for number in range(options.rounds + 1):
                found = {"engine alone": (offline(llm, number), 0.0)}
                for stream in (False, True):
                    found["HTTP, streams" if stream else "HTTP, whole answers"] = served(url, psutil.Process(server.pid), engine, number, stream)
                if number:  # The first round warms up.
                    best = {name: max(best[name], found[name]) for name in best}
        finally:
            server.terminate()
            server.wait()
    lines = ["# What HTTP costs", "", machine(), "", __doc__.split("\n\n")[1], ""]
    lines += ["| | output tokens / engine CPU s | ratio | callback CPU ms / request |", "| --- | --- | --- | --- |"]
    for name, (rate, callback) in best.items():
        lines.append(f"| {name} | {rate:.0f} | {rate / best['engine alone'][0]:.2f} | {callback * 1e3:.1f} |")
    print("\n".join(lines))
    print(f"wrote {write_report('serving', chr(10).join(lines), options.out)}")


def ready(server: "subprocess.Popen[bytes]", log: Path) -> str:
    """The server's address, once it serves."""
    while b"serving" not in log.read_bytes():
        if server.poll() is not None:
            sys.exit(log.read_text())
        time.sleep(0.05)
    return "http://" + log.read_text().split("http://")[1].split()[0]


def prompts(number: int) -> list[list[int]]:
    """Token ids that no round has seen before, so that no cache helps."""
    draw = torch.Generator().manual_seed(number)
    return torch.randint(3, 90, (REQUESTS, PROMPT), generator=draw).tolist()


def offline(llm: LLM, number: int) -> float:
    before = time.process_time()
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=1)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts(3 * number)], params, use_tqdm=False)
    return REQUESTS * OUTPUT / (time.process_time() - before)


def served(url: str, callback: psutil.Process, engine: psutil.Process, number: int, stream: bool) -> tuple[float, float]:
    before = [sum(process.cpu_times()[:2]) for process in (engine, callback)]
    asyncio.run(ask(url, prompts(3 * number + 1 + stream), stream))
    used = [sum(process.cpu_times()[:2]) - old for process, old in zip((engine, callback), before, strict=True)]
    return REQUESTS * OUTPUT / used[0], used[1] / REQUESTS


async def ask(url: str, asked: list[list[int]], stream: bool) -> None:
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def one(prompt: list[int]) -> None:
            body = {"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "seed": 1, "stream": stream}
            response = await client.post(f"{url}/v1/completions", json=body)
            response.raise_for_status()

        await asyncio.gather(*(one(prompt) for prompt in asked))


if __name__ == "__main__":
    main()
