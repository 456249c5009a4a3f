"""Every pair of layouts that weights are checked between without a job, with the result of each.

    python benchmarks/weights_check.py [--rows FILE ...] [--backends]

It runs `tandem weights check --all` for the small model that the command makes, and for one with a mixture of experts: its trainers with experts on ranks
of their own against every rollout, and every trainer against the plainest rollout. A pair takes two versions of random weights from the trainer's real ranks to
real engines, and compares every digest of both with the Hugging Face folder, in both directions. `--rows`: lines that `tandem weights check --all --json` has
printed, instead of running it.

`--backends`: pairs with trainers and engines of other libraries, which need their environments (`tandem sidecar install`), in place of Tandem's own. Where a
machine has no GPU, Megatron-Core needs the shim of `tests/backends/megatron_on_cpu`.

The exit status is 1 if a pair is wrong or failed.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import machine, write_report
from options import parser as shared_parser

Row = dict[str, Any]
EXPERTS = """
model:
  create: {architecture: qwen3_moe, num_experts: 4, hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16,
    intermediate_size: 128, max_position_embeddings: 48}
task: {name: sort}
sft: {}
"""
OF_EXPERTS = (("--trainer", "data=2,expert=2"), ("--trainer", "data=2,expert=2,zero=1"), ("--rollout", "", "--sleep", "0"))
RIGHT = ("ok", "refused", "too large")
SIZES = "hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32, intermediate_size: 128"
MODELS_OF_BACKENDS = {
    name: f"model:\n  create: {{architecture: {architecture}, {SIZES}, max_position_embeddings: 48}}\ntask: {{name: sort}}\nsft: {{}}\n"
    for name, architecture in (("dense", "qwen3"), ("experts", "qwen3_moe, num_experts: 4, moe_intermediate_size: 64"))
}
"""Heads of 32 values, for which vLLM has an attention on a CPU."""
OF_BACKENDS = (
    ("dense", "", "backend=vllm"), ("dense", "tensor=2", "backend=vllm,tensor_parallel_size=2"), ("dense", "data=2,zero=3", "backend=vllm,dtype=bfloat16"),
    ("dense", "lora.rank=4", "backend=vllm"), ("dense", "backend=megatron,tensor=2", "backend=vllm"),
    ("dense", "backend=deepspeed,data=2,zero=3", "backend=vllm,tensor_parallel_size=2"), ("experts", "data=2,expert=2", "backend=vllm"),
    ("experts", "", "backend=vllm,tensor_parallel_size=2"), ("dense", "backend=megatron", ""), ("dense", "backend=megatron,data=2,zero=1", ""),
    ("dense", "backend=megatron,tensor=2,sequence_parallel=true", ""), ("dense", "backend=megatron,pipeline=2", ""),
    ("dense", "backend=megatron,tensor=2,pipeline=2", "tensor_parallel_size=2"), ("dense", "backend=megatron,data=2,zero=1,precision=bf16", ""),
    ("experts", "backend=megatron,data=2,expert=2,zero=1", ""), ("dense", "backend=deepspeed,data=2,zero=1", ""),
    ("dense", "backend=deepspeed,data=2,zero=2", "tensor_parallel_size=2"), ("dense", "backend=deepspeed,data=2,zero=3", ""),
    ("dense", "backend=deepspeed,data=2,zero=2,offload=cpu", ""), ("experts", "backend=deepspeed,data=2,zero=3", ""),
)
"""Model, trainer and rollout."""


def rows_of(given: Sequence[str]) -> Iterator[Row]:
    """Yields the rows that the command prints for every pair."""
    command = [sys.executable, "-m", "tandem", "weights", "check", "--json", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            row = json.loads(line)
            print(f"{row['trainer'] or 'one rank'} -> {row['rollout'] or 'one rank'}: {row['result']}", flush=True)
            yield row


def every_row() -> list[Row]:
    with TemporaryDirectory() as folder:
        recipe = Path(folder) / "experts.yaml"
        recipe.write_text(EXPERTS)
        return [*rows_of(("--all",)), *(row for given in OF_EXPERTS for row in rows_of(("--all", "--model", str(recipe), *given)))]


def rows_of_backends() -> Iterator[Row]:
    with TemporaryDirectory() as folder:
        for model, trainer, rollout in OF_BACKENDS:
            recipe = Path(folder) / f"{model}.yaml"
            recipe.write_text(MODELS_OF_BACKENDS[model])
            yield from rows_of(("--model", str(recipe), "--trainer", trainer, "--rollout", rollout, "--sleep", "0"))


def report_of_backends(rows: Sequence[Row]) -> str:
    """A row a pair."""
    lines = ["| model | trainer | rollout | result | tensors | digests of engines | seconds |", "|" + " --- |" * 7]
    for row in rows:
        pair = f"| {Path(row['model']).stem} | {row['trainer'] or 'one rank'} | {row['rollout'] or 'one rank'} "
        lines.append(f"{pair}| {row['result']} | {row.get('tensors', 0)} | {row.get('digests', 0):,} | {row.get('seconds', 0):.0f} |")
    found = [f"- {row['trainer']} -> {row['rollout']}: {line}" for row in rows if row["result"] != "ok" for line in row["found"]]
    about = (
        "Pairs of `tandem weights check` with trainers and engines of other libraries. A pair takes two versions of random weights from the trainer's ranks to "
        "the engine, and compares every digest of both with the Hugging Face folder; those of vLLM are also compared with what vLLM's own loaders read. "
        "Without a GPU Megatron-Core runs under the shim of `tests/backends/megatron_on_cpu`."
    )
    rest = ["Not equal, or refused:\n\n" + "\n".join(found)] if found else []
    return "\n\n".join(["# Weights between libraries", about, machine(), "\n".join(lines), *rest])


def unique(rows: Sequence[Row]) -> list[Row]:
    """Returns each pair once: those of the plainest rollout are in two parts."""
    return list({(row["model"] and Path(row["model"]).stem, row["trainer"], row["rollout"], row["sleep"]): row for row in rows}.values())


def table(rows: Sequence[Row]) -> str:
    """A row a trainer, and how many of its pairs have each result."""
    lines = ["| model | trainer | pairs | ok | refused by the recipe | too large | wrong or failed | tensors | digests of engines |", "|" + " --- |" * 9]
    for model, trainer in dict.fromkeys((row["model"], row["trainer"]) for row in rows):
        own = [row for row in rows if (row["model"], row["trainer"]) == (model, trainer)]
        counts = Counter(row["result"] for row in own)
        wrong = sum(count for result, count in counts.items() if result not in RIGHT)
        tensors, digests = max((row.get("tensors", 0) for row in own), default=0), sum(row.get("digests", 0) for row in own)
        results = " | ".join(str(counts[result]) for result in RIGHT)
        lines.append(f"| {'experts' if model else 'dense'} | {trainer or 'one rank'} | {len(own)} | {results} | {wrong} | {tensors} | {digests:,} |")
    counts = Counter(row["result"] for row in rows)
    wrong = sum(count for result, count in counts.items() if result not in RIGHT)
    digests = sum(row.get("digests", 0) for row in rows)
    lines.append(f"| **all** | | {len(rows)} | {' | '.join(str(counts[result]) for result in RIGHT)} | **{wrong}** | | {digests:,} |")
    return "\n".join(lines)


def report(rows: Sequence[Row]) -> str:
    rollouts = dict.fromkeys((row["rollout"] or "one rank") + (f", sleep level {row['sleep']}" if row["sleep"] else "") for row in rows)
    refused = [f"- {row['trainer']} -> {row['rollout'] or 'one rank'}: {row['found'][0]}" for row in rows if row["result"] == "refused"]
    found = [f"- {row['trainer']} -> {row['rollout']}: {line}" for row in rows if row["result"] not in RIGHT for line in row["found"]]
    about = (__doc__ or "").split("\n\n")
    return "\n\n".join([
        "# Weights between layouts", about[0], machine(), about[2], table(rows), "Rollouts: " + "; ".join(rollouts) + ".",
        *(["Refused:\n\n" + "\n".join(refused)] if refused else []), *(["Wrong or failed:\n\n" + "\n".join(found)] if found else []),
    ])  # fmt: skip


def main() -> int:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--rows", type=Path, nargs="+", metavar="FILE", help="rows that the command has printed")
    parser.add_argument("--backends", action="store_true", help="pairs with other libraries, in place of those of Tandem's own trainer and engine")
    given = parser.parse_args()
    make = rows_of_backends if given.backends else every_row
    rows = unique([json.loads(line) for file in given.rows for line in file.read_text().splitlines()] if given.rows else list(make()))
    if given.backends:
        print(write_report("weights-check-backends", report_of_backends(rows), given.out))
    else:
        print(write_report("weights-check", report(rows), given.out))
    return int(any(row["result"] not in RIGHT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
