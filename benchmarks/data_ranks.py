"""GRPO on data-parallel ranks of one thread each, beside one process with as many threads: the same recipe, start model and prompts.

    python benchmarks/data_ranks.py [--ranks 2] [--zero 1] [--steps 20] [--rounds 4]

Every side is the real command, a short run of ``tandem train`` with recipes/sort.yaml but for its first stage, which is done once for both:
``--machine.threads=RANKS`` alone, and with ``--parallel.data=RANKS --parallel.zero=ZERO``. The runs take turns. Seconds are those of the rows in
``metrics.jsonl``: of the update (``timing_s/train``), of the reference's pass (``timing_s/inference``) and of the whole step (``timing_s/step``),
which has the rollout, the scores and the way of the weights into the engine too. The first steps of a run are not counted. Ratios are the seconds
of one process over those of the ranks: above 1, the ranks are faster.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from machine import ROOT, best_and_median, machine, write_ratios, write_report
from options import parser as shared_parser
from start_model import RECIPE, warm_model

GATE = 0.95
UNCOUNTED = 3
"""Steps at the start of a run: the first has the start of the engine and an evaluation, and a checkpoint is written beside the next."""
PHASES = {"timing_s/train": "update", "timing_s/inference": "reference pass", "timing_s/step": "whole step"}
JUDGED = ("timing_s/train", "timing_s/step")
Steps = list[dict[str, Any]]


def write_recipe(model: Path, folder: Path) -> Path:
    """The sort recipe that begins with ``model`` and evaluates as little as it can."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    del recipe["sft"]
    recipe["model"] = {"path": str(model.resolve())}
    recipe["evaluation"] = {**recipe["evaluation"], "every_steps": 10**6, "prompts": 1, "final_prompts": 1}
    path = folder / "sort.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def run(recipe: Path, name: str, steps: int, overrides: Sequence[str]) -> Steps:
    """The counted rows of one run. Exits where it fails."""
    command = [sys.executable, "-m", "tandem.cli.main", "train", str(recipe), f"--run.directory={recipe.parent}", f"--run.name={name}"]
    command += [f"--run.max_steps={UNCOUNTED + steps}", *overrides]
    # What Python finds first is the code of this folder, wherever the command is given.
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rows = recipe.parent / name / "metrics.jsonl"
    if not rows.exists() or len(found := rows.read_text(encoding="utf-8").splitlines()) < UNCOUNTED + steps:
        tail = "\n".join(done.stdout.splitlines()[-20:])
        sys.exit(f"the run with {' '.join(overrides)} ended with status {done.returncode}:\n{tail}")
    return [json.loads(row) for row in found[UNCOUNTED:]]


def measure(model: Path, work: Path, ranks: int, zero: int, steps: int, rounds: int) -> dict[str, Steps]:
    """The counted rows of both sides, whose runs take turns."""
    threads = f"--machine.threads={ranks}"
    sides = {"one process": [threads], "ranks": [threads, f"--parallel.data={ranks}", f"--parallel.zero={zero}"]}
    found: dict[str, Steps] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        recipe = write_recipe(model, Path(folder).resolve())
        for turn in range(rounds):
            for name, overrides in sides.items():
                rows = run(recipe, f"{name.replace(' ', '-')}-{turn}", steps, overrides)
                found[name] += rows
                shown = {phase: round(statistics.median(row[key] for row in rows), 3) for key, phase in PHASES.items()}
                print(f"round {turn}, {name}: median seconds {shown}", file=sys.stderr, flush=True)
    return found


def ratios_of(found: Mapping[str, Steps], key: str) -> tuple[float, float]:
    """(best, median) seconds of one process over those of the ranks."""
    a, b = (best_and_median([row[key] for row in found[name]]) for name in ("one process", "ranks"))
    return a[0] / b[0], a[1] / b[1]


def table(found: Mapping[str, Steps]) -> list[str]:
    lines = ["| seconds of | one process, best / median | ranks | one process / ranks |", "|---|---|---|---|"]
    for key, phase in PHASES.items():
        cells = ["{:.4f} / {:.4f}".format(*best_and_median([row[key] for row in rows])) for rows in found.values()]
        best, median = ratios_of(found, key)
        lines.append(f"| {phase} (`{key}`) | {' | '.join(cells)} | **{best:.2f}** / {median:.2f} |")
    return lines


def parts(found: Mapping[str, Steps]) -> list[str]:
    """The median milliseconds of every phase that a row has, which says where a step's difference comes from."""
    keys = sorted({key for rows in found.values() for row in rows for key in row if key.startswith("timing_s/")})
    lines = ["| phase | one process, median ms | ranks |", "|---|---|---|"]
    for key in keys:
        medians = [statistics.median(row.get(key, 0.0) for row in rows) * 1e3 for rows in found.values()]
        lines.append(f"| {key.removeprefix('timing_s/')} | " + " | ".join(f"{value:.1f}" for value in medians) + " |")
    return lines


def equality(found: Mapping[str, Steps]) -> str:
    """How alike the work of both sides was: they draw the same samples until a sum's last bit makes them draw another."""
    pairs = list(zip(found["one process"], found["ranks"], strict=True))
    same = sum(a["reward/mean"] == b["reward/mean"] and a["response_length/mean"] == b["response_length/mean"] for a, b in pairs)
    lengths = [statistics.mean(row["response_length/mean"] for row in rows) for rows in found.values()]
    return f"{same} of {len(pairs)} steps had equal rewards and lengths; {lengths[0]:.2f} / {lengths[1]:.2f} tokens a completion."


def main() -> None:
    parser = shared_parser(__doc__ or "", work="the start model is")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks, and threads of the one process")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=1, help="ZeRO stage of the ranks")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of a run")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each side")
    options = parser.parse_args()
    described = machine()
    options.work.mkdir(parents=True, exist_ok=True)
    found = measure(warm_model(options.work), options.work, options.ranks, options.zero, options.steps, options.rounds)
    promises: list[dict[str, Any]] = []
    for key in JUDGED:
        best, median = ratios_of(found, key)
        what = f"GRPO, {PHASES[key]}, {options.ranks} data-parallel ranks against one process"
        promises.append({"what": what, "ratio": best, "median": median, "target": GATE})
    verdicts = [f"{row['what']}: {row['ratio']:.2f}, at least {GATE:g}: {'met' if row['ratio'] >= GATE else 'MISSED'}." for row in promises]
    text = "\n".join([
        "# GRPO on data-parallel ranks beside one process", "", described, "",
        f"{options.ranks} ranks of one thread each (ZeRO {options.zero}) beside one process with {options.ranks} threads; {options.rounds} runs of "
        f"{options.steps} counted steps a side, taken in turn, of the sort recipe from the same warm model: 32 prompts x 8 samples, up to 32 new tokens, "
        f"a KL term. Wall seconds, since cores are what is divided. {equality(found)}", "",
        *table(found), "", *verdicts, "", "Where the seconds go:", "", *parts(found), "",
    ])  # fmt: skip
    print(text)
    print(f"wrote {write_report('data-ranks', text, options.out)}")
    write_ratios("data_ranks", promises, options.work)


if __name__ == "__main__":
    main()
