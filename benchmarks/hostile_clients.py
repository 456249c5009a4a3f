"""What hostile clients cost honest ones.

100 honest clients stream completions of 64 tokens, first alone, then beside hostile clients: prompts of 9.9 MiB for a context of 512 tokens,
texts and lists as large as the server accepts, uploads that crawl or stop, idle connections, readers that leave, lone surrogates, absurd numbers
and deep nesting; large requests once in two seconds of each kind, small ones ten times a second, 360 connections that are slow, stopped or idle.
The server has one engine of 3.2 million random parameters with one thread; the hostile clients run at the lowest priority, as
they would not share the server's cores. Latencies are seen by the clients. Memory is the resident size of the server with its engine:
after the honest clients alone, at most beside the hostile ones, and a few seconds after they have left.

    python benchmarks/hostile_clients.py [--seconds 30] [--server-code FOLDER] [--out benchmarks/results]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from machine import HERE, ROOT, machine, write_report
from serving import ready
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.config.model import NewModelConfig
from tandem.model.create_model import create_model
from tandem.runtime.process.processes import Threads

MIB = 2**20
SETTLE_S = 6.0
CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café, 你好世界 — 😀😃 and 1234"] * 20


@dataclass(frozen=True)
class Found:
    """``first``, ``between``: seconds to the first token and between tokens, alone and beside. ``before``, ``most``, ``after``: bytes of the server and of
    its engine. ``answers``: how often each kind of hostile request got which status."""

    first: tuple[list[float], list[float]]
    between: tuple[list[float], list[float]]
    failed: tuple[float, float]
    before: tuple[int, int]
    most: tuple[int, int]
    after: tuple[int, int]
    answers: dict[str, dict[str, int]]


class Sizes(threading.Thread):
    """Samples the resident sizes of the server and its engine."""

    def __init__(self, server: int) -> None:
        super().__init__(daemon=True)
        self._processes = [psutil.Process(server), *psutil.Process(server).children()]
        self.is_over = False
        self.most = self.now()
        self.start()

    def now(self) -> tuple[int, int]:
        server, engine = (process.memory_info().rss for process in self._processes)
        return server, engine

    def run(self) -> None:
        while not self.is_over:
            self.most = tuple(map(max, self.most, self.now()))  # type: ignore[assignment]
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the honest clients alone, and again beside the hostile ones")
    parser.add_argument("--server-code", type=Path, default=ROOT, help="the repository whose server is measured")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where the report goes")
    options = parser.parse_args()
    began = machine()
    with tempfile.TemporaryDirectory() as work:
        found = measure(make_model(Path(work)), Path(work), options)
    text = report(found, began)
    print(text)
    print(f"wrote {write_report('hostile-clients', text, options.out)}")


def make_model(folder: Path) -> Path:
    """Writes a model with a byte-level tokenizer, as real ones have."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special, alphabet = ["<pad>", "<bos>", "<eos>"], pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False))
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    backend.save(str(tokenizer / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    config = NewModelConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32, intermediate_size=768,
        max_position_embeddings=512, tokenizer=str(tokenizer),
    )  # fmt: skip
    torch.set_num_threads(1)
    create_model(config, 0, folder / "model")
    return folder / "model"


def measure(model: Path, work: Path, options: argparse.Namespace) -> Found:
    command = [str(Path(sys.executable).with_name("tandem")), "serve", str(model), "--port", "0", "--threads", "1", "--max-num-seqs", "128"]
    environment = {**os.environ, **Threads(1).environment(), "PYTHONPATH": str(options.server_code.resolve())}
    log = work / "serve.log"
    with log.open("wb") as sink:
        server = subprocess.Popen([*command, "--request-timeout", "10"], stderr=sink, env=environment)
    try:
        url = ready(server, log)
        fill_cache(url)
        alone = result(clients("honest", url, options.seconds))
        time.sleep(SETTLE_S)
        sizes = Sizes(server.pid)
        before = sizes.now()
        attack = clients("hostile", url, options.seconds + 2)
        time.sleep(2)
        beside = result(clients("honest", url, options.seconds))
        answers = result(attack)
        time.sleep(SETTLE_S)
        after, most = sizes.now(), sizes.most
        sizes.is_over = True
        sizes.join()
    finally:
        server.terminate()
        server.wait()
    return Found(
        (alone["first"], beside["first"]), (alone["between"], beside["between"]), (alone["failed"][0], beside["failed"][0]), before, most, after, answers
    )


def fill_cache(url: str) -> None:
    """Uses every block of the KV cache once, which is allocated at the start and resident from its first use. The prompts have no beginning in common, and few
    are asked at once, so that a slow machine answers them within the server's limit of time too."""
    with httpx.Client(timeout=600) as client, ThreadPoolExecutor(4) as threads:

        def ask(number: int) -> None:
            prompt = [3 + (number + 7 * place) % 290 for place in range(500)]
            client.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}).raise_for_status()

        list(threads.map(ask, range(140)))


def clients(kind: str, url: str, seconds: float) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, str(HERE / "hostile_load.py"), kind, url, str(seconds)], stdout=subprocess.PIPE)


def result(process: "subprocess.Popen[bytes]") -> Any:
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"the clients ended with status {process.returncode}")
    return json.loads(output)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(found: Found, began: str) -> str:
    lines = ["# What hostile clients cost honest ones", "", began, "", (__doc__ or "").split("\n\n")[1], ""]
    lines += ["| honest clients | alone | beside hostile clients | ratio |", "| --- | --- | --- | --- |"]
    for name, (alone, beside) in (("time to first token", found.first), ("inter-token latency", found.between)):
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            values = percentile(alone, share), percentile(beside, share)
            lines.append(f"| {name}, {label} | {values[0] * 1e3:.0f} ms | {values[1] * 1e3:.0f} ms | {values[1] / values[0]:.2f} |")
    tokens = [len(first) + len(between) for first, between in zip(found.first, found.between, strict=True)]
    lines.append(f"| tokens | {tokens[0]} | {tokens[1]} | {tokens[1] / tokens[0]:.2f} |")
    lines.append(f"| requests without an answer | {found.failed[0]:.0f} | {found.failed[1]:.0f} | |")
    lines += ["", "| resident memory | before | at most | after | after / before |", "| --- | --- | --- | --- | --- |"]
    sizes = {name: (found.before[i], found.most[i], found.after[i]) for i, name in enumerate(("server", "engine"))}
    sizes["both"] = (sum(found.before), sum(found.most), sum(found.after))
    for name, (before, most, after) in sizes.items():
        lines.append(f"| {name} | {before / MIB:.0f} MiB | {most / MIB:.0f} MiB | {after / MIB:.0f} MiB | {after / before:.2f} |")
    lines += ["", "| hostile requests | statuses (count; 0: the connection ended without one) |", "| --- | --- |"]
    for kind, counts in sorted(found.answers.items()):
        lines.append(f"| {kind} | {', '.join(f'{status} ({count})' for status, count in sorted(counts.items()))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
