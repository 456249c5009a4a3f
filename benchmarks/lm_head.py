"""Peak memory and seconds of the LM head: log-probabilities of given tokens and the gradients by hidden states and head.

Ours works on chunks of the logits and returns the entropy too; the plain one is torch: `hidden @ weight.T`, `log_softmax`, `gather`,
and their backward. Each side runs in a process of its own. "peak" is the resident peak above what the process holds before the forward pass,
with the two gradients that both return; "of all logits" is that peak by the bytes of all logits in fp32. "predicted" is these gradients
and, of ours, `tandem.layout.lm_head.logits_bytes`; of the plain one, three times all logits (log-probabilities, and the gradients by them
and by the logits). The plain one is measured at the most tokens whose prediction fits in `--limit-gb`, in steps of 512.

    python benchmarks/lm_head.py [--tokens 32768] [--vocabulary 151936] [--hidden 64] [--limit-gb 6] [--threads 1] [--out benchmarks/results]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from machine import machine, write_report
from options import parser

from tandem.kernels import select
from tandem.layout.lm_head import logits_bytes

PLAIN_COPIES = 3


def status_bytes(key: str) -> int:
    """A figure of this process from /proc."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(side: str, tokens: int, vocabulary: int, hidden: int) -> dict[str, float]:
    """``peak`` in bytes, and wall and CPU seconds, of one forward and backward pass in this process."""
    kernels = select("cpu")

    def passes(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
        if side == "tandem":
            raw = kernels.token_logprobs(x, weight, targets, 1.0).raw
        else:
            raw = (x @ weight.t()).log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
        raw.mean().backward()

    def made(rows: int, ids: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, weight = torch.randn(rows, hidden), torch.randn(ids, hidden).mul_(0.1)
        x.grad, weight.grad = torch.zeros_like(x), torch.zeros_like(weight)
        return x.requires_grad_(), weight.requires_grad_(), torch.randint(ids, (rows,))

    passes(*made(300, 600))  # what a first call loads
    inputs = made(tokens, vocabulary)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before, wall, cpu = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
    passes(*inputs)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"peak": status_bytes("VmHWM") - before, "wall": wall, "cpu": cpu}


def in_own_process(side: str, tokens: int, options: argparse.Namespace) -> dict[str, float]:
    sizes = [f"--tokens={tokens}", f"--vocabulary={options.vocabulary}", f"--hidden={options.hidden}", f"--threads={options.threads}"]
    # So that freed memory goes back at once.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": str(options.threads)}
    command = [sys.executable, __file__, f"--side={side}", *sizes]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"the side '{side}' of {tokens} tokens ended with status {done.returncode}; see its error above")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(options: argparse.Namespace) -> list[str]:
    """The rows of a Markdown table."""
    vocabulary, hidden, many = options.vocabulary, options.hidden, options.tokens
    fits = max(512, int(options.limit_gb * 1e9 - 4 * hidden * vocabulary) // (4 * (PLAIN_COPIES * vocabulary + hidden)) // 512 * 512)
    lines = [
        "| side | tokens | all logits MiB | predicted peak MiB | peak MiB | of all logits | wall s | CPU s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    sides = [("tandem", min(fits, many)), ("plain", min(fits, many))]
    sides += [("tandem", many), ("plain", many)] if fits < many else []
    for side, tokens in sides:
        whole = 4 * tokens * vocabulary
        predicted = 4 * hidden * (tokens + vocabulary)
        predicted += logits_bytes(tokens, vocabulary, hidden) if side == "tandem" else PLAIN_COPIES * whole
        start = f"| {side} | {tokens} | {whole / 2**20:,.0f} | {predicted / 2**20:,.0f} |"
        if side == "plain" and tokens > fits:
            lines.append(f"{start} not measured: more than {options.limit_gb:g} GB | | | |")
        else:
            found = in_own_process(side, tokens, options)
            lines.append(f"{start} {found['peak'] / 2**20:,.0f} | {found['peak'] / whole:.3f} | {found['wall']:.1f} | {found['cpu']:.1f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    made = parser(__doc__, threads=1)
    made.add_argument("--tokens", type=int, default=32_768)
    made.add_argument("--vocabulary", type=int, default=151_936)
    made.add_argument("--hidden", type=int, default=64)
    made.add_argument("--limit-gb", type=float, default=6.0, help="the plain side is not measured where it is predicted to take more")
    made.add_argument("--side", choices=["tandem", "plain"], help="measure this side in this process and print it as JSON")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    if options.side:
        print(json.dumps(measure(options.side, options.tokens, options.vocabulary, options.hidden)))
        return
    sizes = f"V = {options.vocabulary:,}, H = {options.hidden}, fp32, threads: {options.threads}."
    text = ["# LM head", "", machine(), "", *__doc__.split("\n\n")[1:2], "", sizes, "", *table(options)]
    print(f"wrote {write_report('lm-head', chr(10).join(text), options.out)}")


if __name__ == "__main__":
    main()
