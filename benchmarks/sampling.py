"""Drawing tokens and taking log-probabilities beside torch, by vocabulary, microseconds of CPU time a row.

torch's side is what a sampler written with it does: ``topk`` and a mask, ``sort`` and a cumulative sum for top-p, ``softmax`` and
``multinomial``; ours also returns the raw and the processed log-probability of the token. The two take turns in one process, the best
of the repetitions counts. "spread" is the standard deviation of the random logits: 1 is a model that knows nothing, 6 a sure one.

    python benchmarks/sampling.py [--seconds 0.5] [--out benchmarks/results]
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from linear import interleaved
from machine import HERE, machine, write_report
from torch import Tensor

from tandem.kernels import select

ROWS = 8
SETTINGS = [("all tokens", 0, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", 0, 0.9), ("top-k 50, top-p 0.9", 50, 0.9)]


def torch_sample(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, ids = logits.sort(descending=True)
        mass = ordered.softmax(-1)
        ordered = ordered.masked_fill(mass.cumsum(-1) - mass >= top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(1, ids, ordered)
    return logits.softmax(-1).multinomial(1)


def row(what: str, vocabulary: int, spread: float, calls: list[Callable[[], object]], seconds: float) -> str:
    ours, theirs = (best.cpu / ROWS * 1e6 for best in interleaved(calls, seconds))
    line = f"| {what} | {vocabulary:,} | {spread:.0f} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.1f} |"
    print(line, flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each row of the table")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where the report goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    described, kernels = machine(), select("cpu")
    lines = ["| what | vocabulary | spread | ours us | torch us | torch / ours |", "| --- | --- | --- | --- | --- | --- |"]
    ones, uniform, targets = torch.ones(ROWS), torch.rand(ROWS, dtype=torch.float64), torch.arange(ROWS)
    for vocabulary in (99, 2048, 32_000, 151_936):
        for spread in (1.0, 6.0):
            logits = torch.randn(ROWS, vocabulary) * spread
            for what, top_k, top_p in SETTINGS:
                columns = (ones, (ones * top_k).long(), ones * top_p, ones * 0, uniform)
                calls = [
                    lambda logits=logits, columns=columns: kernels.sample_rows(logits, *columns),
                    lambda logits=logits, k=top_k, p=top_p: torch_sample(logits, k, p),
                ]
                lines.append(row(what, vocabulary, spread, calls, options.seconds))
        takes = [
            lambda logits=logits: kernels.logits_logprobs(logits, targets),
            lambda logits=logits: logits.log_softmax(-1).gather(1, targets.unsqueeze(1)),
        ]
        lines.append(row("log-probability of a token", vocabulary, spread, takes, options.seconds))
    text = "\n".join(["# Sampling beside torch", "", described, "", __doc__.split("\n\n")[1], "", *lines])
    print(f"wrote {write_report('sampling', text, options.out)}")


if __name__ == "__main__":
    main()
