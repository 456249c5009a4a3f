"""Every benchmark, one after the other, and one table of what was promised and what was measured.

    python benchmarks/run_all.py [--peer-python .venv-peer/bin/python] [--only linear rollout] [--quick]

Each benchmark writes its own report to benchmarks/results, and this one ``summary-DATE.md``. Ends with exit code 1 where a
benchmark failed to run; a target that was missed is a line of the table, not a failure. The engine's benchmark and those of single
parts are run where --only names them.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import HERE, machine, write_report
from options import parser as shared_parser

PEERED = ("dpo_step", "grpo_step", "rollout", "time_to_accuracy", "training", "engine")
DEFAULT = ("linear", "weight_update", "rollout", "grpo_step", "dpo_step", "training", "time_to_accuracy")
"""Without the engine's: it takes hours and peers that `make bench` does not install."""
OTHERS = (
    "attention", "batching", "channel", "checkpointing", "commits", "data_ranks", "equality", "kills", "kv_cache", "lm_head", "moe", "one_step_off",
    "quantization", "quantization_formats", "quantized_steps", "request_features", "sampling", "serving", "shared_prompt", "speculation", "startup",
    "tensor_parallel", "tokenizing", "training_choices", "weights", "weights_shared", "zero_memory",
)
"""Run where --only names them: their reports stand for themselves, and nothing of them is in the summary."""
QUICK = {
    "engine": ["--quick", "--models", "3.7M"],
    "grpo_step": ["--steps", "2"], "dpo_step": ["--steps", "2"], "training": ["--rounds", "2", "--threads", "1"],
    "commits": ["--rounds", "1"], "data_ranks": ["--rounds", "1", "--steps", "4"],
    "rollout": ["--rounds", "2"], "time_to_accuracy": ["--steps", "10", "--seeds", "0"], "linear": ["--seconds", "0.02"],
}


def run(name: str, arguments: Sequence[str]) -> str | None:
    """What the benchmark printed, or ``None`` where it failed."""
    print(f"--- {name}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), *arguments], stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    return done.stdout if done.returncode == 0 else None


def tables(text: str) -> list[list[dict[str, str]]]:
    """The Markdown tables of ``text``, each a list of rows by column name."""
    found: list[list[dict[str, str]]] = []
    names: list[str] | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            names = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if names is None:
            # Columns of the same name are told apart by how often it stood before.
            names = [cell + "'" * cells[:i].count(cell) for i, cell in enumerate(cells)]
            found.append([])
        elif not set(line) <= set("|-: "):
            found[-1].append(dict(zip(names, cells, strict=True)))
    return found


def linear_ratios(report: str) -> list[dict[str, Any]]:
    """The worst shape of all, and of 4 to 16 rows, for every number of threads."""
    rows: list[dict[str, Any]] = []
    for section in report.split("\n## ")[1:]:
        threads = section.split("\n", 1)[0]
        shapes = next(table for table in tables(section) if table and "MKL / packed" in table[0])
        for what, target, chosen in (("any shape", 1.0, shapes), ("4 to 16 rows", 1.5, [s for s in shapes if 4 <= int(s["rows"]) <= 16])):
            worst = min(chosen, key=lambda shape: float(shape["MKL / packed"]))
            named = f"{worst['N x K']}, {worst['rows']} rows"
            rows.append({"what": f"linear, {what}, {threads}, worst: {named}", "ratio": float(worst["MKL / packed"]), "target": target})
    return rows


def weight_ratios(report: str) -> list[dict[str, Any]]:
    """Verified bytes as a share of the plain copy. Nothing is promised of them but that they are here."""
    rows: list[dict[str, Any]] = []
    for line in tables(report)[0]:
        for name, column in (("register", "share of copy"), ("update", "share of copy'")):
            share = float(line[column].rstrip("%")) / 100
            rows.append({"what": f"weight update, {line['model']}: {name} / plain copy", "ratio": share, "target": None})
    return rows


def verdict(row: dict[str, Any]) -> str:
    """A row of the summary."""
    target = row["target"]
    holds = target is None or (row["ratio"] <= target if row.get("at_most") else row["ratio"] >= target)
    met = "" if target is None else "met" if holds else "MISSED"
    return f"| {row['what']} | {row['ratio']:.2f} | {'' if target is None else f'{target:g}'} | {met} |"


def main() -> int:
    parser = shared_parser(__doc__ or "", peer=True, work="models and logs are")
    parser.add_argument("--only", nargs="+", choices=(*DEFAULT, "engine", *OTHERS), default=DEFAULT)
    parser.add_argument("--quick", action="store_true", help="few repetitions: to see that everything runs")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    described, failed = machine(), []
    rows: list[dict[str, Any]] = []
    for name in options.only:
        arguments = list(QUICK.get(name, [])) if options.quick else []
        if name in PEERED:
            arguments += ["--peer-python", options.peer_python, "--work", str(options.work), "--out", str(options.out)]
        else:
            arguments += ["--out", str(options.out)]
        if name == "weight_update" and options.quick:
            arguments += ["--repeat", "2"]
        printed = run(name, arguments)
        if printed is None:
            failed.append(name)
        elif name in PEERED:
            rows += json.loads((options.work / f"{name}.ratios.json").read_text(encoding="utf-8"))
        elif name in OTHERS:
            continue
        elif name == "linear":
            rows += linear_ratios(Path(printed.rsplit("wrote ", 1)[1].strip()).read_text(encoding="utf-8"))
        else:
            rows += weight_ratios(printed)
    lines = ["# Benchmarks", "", described, "", "| what | ratio | target | |", "|---|---|---|---|", *map(verdict, rows), ""]
    lines += [f"FAILED to run: {name}" for name in failed]
    print("\n".join(lines))
    print(f"wrote {write_report('summary', chr(10).join(lines), options.out)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
