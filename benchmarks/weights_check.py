"""Every pair of layouts that weights are checked between without a job, with the result of each.

    python benchmarks/weights_check.py [--rows FILE ...]

It runs `tandem weights check --all` for the small model that the command makes, and for one with a mixture of experts: its trainers with experts on ranks
of their own against every rollout, and every trainer against the plainest rollout. A pair takes two versions of random weights from the trainer's real ranks to
real engines, and compares every digest of both with the Hugging Face folder, in both directions. `--rows`: lines that `tandem weights check --all --json` has
printed, instead of running it.

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


def rows_of(given: Sequence[str]) -> Iterator[Row]:
    """Yields the rows that the command prints for every pair."""
    command = [sys.executable, "-m", "tandem", "weights", "check", "--all", "--json", *given]
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
        return [*rows_of(()), *(row for given in OF_EXPERTS for row in rows_of(("--model", str(recipe), *given)))]


def unique(rows: Sequence[Row]) -> list[Row]:
    """Returns each pair once: those of the plainest rollout are in two parts."""
    return list({(bool(row["model"]), row["trainer"], row["rollout"], row["sleep"]): row for row in rows}.values())


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
    given = parser.parse_args()
    rows = [json.loads(line) for file in given.rows for line in file.read_text().splitlines()] if given.rows else every_row()
    rows = unique(rows)
    print(write_report("weights-check", report(rows), given.out))
    return int(any(row["result"] not in RIGHT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
