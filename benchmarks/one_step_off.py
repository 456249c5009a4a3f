"""One step off beside the synchronous loop: seconds of a step, the share of the rollout that hides, and the accuracy at the end.

    python benchmarks/one_step_off.py [--steps 40] [--seeds 0 1 2] [--cores 2]

Every side is the real command, a short run of ``tandem train`` from the same fine-tuned model; the sides take turns. *Synchronous*: trainer and rollout take
turns, each with all ``cores``. *One step off*: both work at once, each with half of them. The synchronous loop with half of the cores is the third side: its
phases give the bound of a perfect overlap, the longer of rollout and the rest. Two tasks: recipes/sort.yaml, whose rollout computes all the time, and
recipes/calculator.yaml with a tool that waits ``TOOL_S`` for each call, in
``TOOL_WORKERS`` processes, as one behind a network does. Seconds are medians of the rows of ``metrics.jsonl``; the
first steps of a run are not counted, and no step has an evaluation or a checkpoint. The accuracy is that of the final evaluation, sampled.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from machine import ROOT, machine, write_report
from options import parser as shared_parser

from tandem.runtime.records.journal import Journal

UNCOUNTED = 3
"""Steps at the start of a run: processes warm up, and the first has no rollout ahead."""
TOOL_S, TOOL_WORKERS = 0.05, 8
TOOL = f'''
import time

from tandem.data.tools.calculator import calculator as exact


def calculator(expression: str) -> str:
    """Calculates the value of an arithmetic expression.

    Args:
        expression: The expression.
    """
    time.sleep({TOOL_S})
    return exact(expression)
'''


@dataclass
class Side:
    """A way to run: its settings, and of all of its runs the counted rows and the final accuracies."""

    settings: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    def median(self, key: str) -> float:
        return statistics.median(row.get(key, 0.0) for row in self.rows)


def sides(cores: int) -> dict[str, Side]:
    half = max(cores // 2, 1)
    return {
        "synchronous": Side([f"--machine.threads={cores}"]),
        "synchronous, half of the cores": Side([f"--machine.threads={half}"]),
        "one step off": Side([f"--machine.threads={half}", "--rollout.max_staleness=1"]),
    }


def start_recipe(name: str, folder: Path, command: Sequence[str]) -> Path:
    """Writes recipe ``name`` to ``folder`` so that it begins with its own fine-tuned model, which a run of one step makes, and evaluates at the end alone."""
    recipe = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))
    (folder / "slow_tool.py").write_text(TOOL, encoding="utf-8")
    if recipe["task"].get("tools"):
        recipe["task"]["tools"], recipe["rollout"]["multi_turn"]["tool_workers"] = [f"{folder}/slow_tool.py:calculator"], TOOL_WORKERS
    recipe["evaluation"] = {**recipe["evaluation"], "every_steps": 10**6, "prompts": 1, "final_prompts": 1024}
    recipe["checkpoint"] = {"every_steps": 10**6}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    # Of one held-out prompt the accuracy may be 1.
    once = ["--run.max_steps=1", "--evaluation.final_prompts=1", "--sft.max_accuracy=1"]
    subprocess.run(
        [*command, str(path), f"--run.directory={folder}", f"--run.name={name}-start", *once],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    recipe["model"] = {"path": str(folder / f"{name}-start" / "sft" / "model"), "max_length": recipe["model"]["create"]["max_position_embeddings"]}
    del recipe["sft"]
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def run(recipe: Path, name: str, steps: int, seed: int, side: Side, command: Sequence[str]) -> None:
    """Adds the rows and the accuracy of one run to ``side``."""
    given = [f"--run.directory={recipe.parent}", f"--run.name={name}", f"--run.seed={seed}", f"--run.max_steps={UNCOUNTED + steps}", *side.settings]
    subprocess.run([*command, str(recipe), *given], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = (recipe.parent / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[UNCOUNTED:]]
    with Journal(recipe.parent / name / "journal.sqlite", read_only=True) as journal:
        final = journal.evaluation(UNCOUNTED + steps, "final")
    assert final is not None
    side.rows += rows
    side.accuracies.append(float(final["accuracy"]))
    shown = {key: round(statistics.median(row[key] for row in rows), 3) for key in ("timing_s/step", "timing_s/rollout", "timing_s/train")}
    print(f"{name}: median {shown}, accuracy {side.accuracies[-1]:.3f}", file=sys.stderr, flush=True)


def table(found: dict[str, Side]) -> list[str]:
    """Returns the lines of a table: a row for each side."""
    lines = ["| | step | rollout | of it hidden | train | step, of synchronous | sampled accuracy, each seed |", "| --- | --- | --- | --- | --- | --- | --- |"]
    whole = found["synchronous"].median("timing_s/step")
    for name, side in found.items():
        step, hidden = side.median("timing_s/step"), side.median("perf/rollout_hidden_share")
        accuracies = ", ".join(f"{accuracy:.3f}" for accuracy in side.accuracies)
        lines.append(
            f"| {name} | {step:.3f} s | {side.median('timing_s/rollout'):.3f} s | {hidden:.0%} | {side.median('timing_s/train'):.3f} s | {step / whole:.2f} "
            f"| {accuracies} |"
        )
    half = found["synchronous, half of the cores"]
    rollout, rest = half.median("timing_s/rollout"), half.median("timing_s/step") - half.median("timing_s/rollout")
    bound = f"max({rollout:.3f}, {rest:.3f}) s, {max(rollout, rest) / whole:.2f} of synchronous"
    lines += ["", f"The bound of a perfect overlap with half of the cores each: {bound}."]
    return lines


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", default=["sort", "calculator"])
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    command = ["taskset", "-c", f"0-{options.cores - 1}", sys.executable, "-m", "tandem.cli.main", "train"]
    text = [f"# One step off\n\n{machine()}\n\n{options.cores} cores, {options.steps} counted steps a run, seeds {options.seeds}; medians over steps."]
    for task in options.tasks:
        with tempfile.TemporaryDirectory() as work:
            recipe, found = start_recipe(task, Path(work), command), sides(options.cores)
            for seed in options.seeds:
                for number, (_, side) in enumerate(found.items()):
                    run(recipe, f"{task}-{seed}-{number}", options.steps, seed, side, command)
        waits = f", with a tool that waits {TOOL_S * 1000:.0f} ms, in {TOOL_WORKERS} processes" if task == "calculator" else ""
        text += [f"\n## recipes/{task}.yaml{waits}\n", *table(found)]
    print("\n".join(text))
    write_report("one-step-off", "\n".join(text), options.out)


if __name__ == "__main__":
    main()
