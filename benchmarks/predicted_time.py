"""The time that ``tandem train --dry-run`` predicts beside the time that the same run takes, by phase.

    python benchmarks/predicted_time.py [--only NAME ...]

Rollouts are predicted for the mean length that the run had, and rewards differ in every group, so that every completion is trained on. A run's figure is the
median of its steps without the first.
"""

import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from machine import ROOT, machine, write_report
from options import parser as shared_parser

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import load_config
from tandem.jobs.checks.check_rl import check_rl_run
from tandem.jobs.checks.predicted_time import data_seconds, rl_seconds

REWARDS = "def alternating(completions, **columns):\n    return [float(number % 2) for number in range(len(completions))]\n"
TASK = """
rewards: {functions: [{function: "{rewards}:alternating"}]}
task: {name: sort}
sft: {steps: 12}
evaluation: {every_steps: 100, prompts: 8, final_prompts: 8}
rollout: {prompts_per_step: 8, max_tokens: 32}
trainer: {micro_batch_tokens: 1024}
"""
MODEL = (
    "model: {{create: {{architecture: qwen3, hidden_size: {hidden}, num_hidden_layers: {layers}, num_attention_heads: {heads}, num_key_value_heads: {kv}, "
    "head_dim: 64, intermediate_size: {inner}}}}}"
)
SHAPES = {
    "3.7M": {"hidden": 256, "layers": 4, "heads": 4, "kv": 2, "inner": 768},
    "33M": {"hidden": 512, "layers": 10, "heads": 8, "kv": 8, "inner": 1408},
    "110M": {"hidden": 768, "layers": 14, "heads": 12, "kv": 12, "inner": 2432},
}


def recipes(work: Path) -> dict[str, tuple[str, int]]:
    """Returns the text of each recipe and the number of its steps, by the name of its row. ``work`` has the reward function and the text."""
    task = TASK.replace("{rewards}", str(work / "rewards.py"))
    found = {f"GRPO, {name}": (f"{MODEL.format(**shape)}\n{task}", 5) for name, shape in SHAPES.items()}
    text = f"algorithm: {{name: pretrain}}\ndata: {{train: [{{path: {work / 'text'}}}], sequence_length: 256, global_batch_size: 16}}"
    model = MODEL.replace("head_dim", "tokenizer: {tokenizer}, head_dim").format(**SHAPES["33M"], tokenizer=work / "tokenizer")
    found["pretraining, 33M"] = (f"{model}\n{text}", 5)
    return found


def measured(run: Path) -> dict[str, float]:
    """Returns the medians of a run's metrics over its steps but the first."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ("timing_s/rollout", "timing_s/train", "timing_s/step", "response_length/mean", "train/tokens")
    return {name: statistics.median(row[name] for row in rows[1:] if name in row) for name in names if name in rows[-1]}


def compare(text: str, steps: int, folder: Path) -> list[tuple[str, float, float]]:
    """Returns each phase with its predicted and its measured seconds."""
    path = folder / "recipe.yaml"
    path.write_text(f"{text}\nrun: {{max_steps: {steps}, name: run, directory: {folder}}}\n", encoding="utf-8")
    subprocess.run([sys.executable, "-m", "tandem.cli.main", "train", str(path)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    took, recipe = measured(folder / "run"), load_config(path)
    if isinstance(recipe, PretrainRecipe):
        return [("step", data_seconds(recipe).step, took["timing_s/step"])]
    predicted = rl_seconds(recipe, check_rl_run(recipe).prompts, took["response_length/mean"])
    return [
        ("generation", predicted.generation, took["timing_s/rollout"]),
        ("training", predicted.training, took["timing_s/train"]),
        ("step", predicted.generation + predicted.inference + predicted.training, took["timing_s/step"]),
    ]


def prepare(work: Path) -> None:
    """Writes the reward function, and the text of the Python standard library in tokens, to ``work``."""
    (work / "rewards.py").write_text(REWARDS, encoding="utf-8")
    library = Path(sysconfig.get_path("stdlib")) / "json"
    tokenize = ("tokenize", library, work / "text", "--tokenizer", work / "tokenizer", "--new-vocabulary", "4096", "--suffix", ".py", "--skip-broken")
    subprocess.run([sys.executable, "-m", "tandem.cli.main", *map(str, tokenize)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", default=(), help="the names of the runs to take, such as 'GRPO, 33M'")
    options = parser.parse_args()
    described, lines = machine(), ["| run | phase | predicted s | measured s | predicted / measured |", "| --- | --- | --- | --- | --- |"]
    with tempfile.TemporaryDirectory() as work:
        prepare(Path(work))
        for number, (name, (text, steps)) in enumerate(recipes(Path(work)).items()):
            if options.only and name not in options.only:
                continue
            folder = Path(work) / str(number)
            folder.mkdir()
            for phase, predicted, seconds in compare(text, steps, folder):
                lines.append(f"| {name} | {phase} | {predicted:.3g} | {seconds:.3g} | {predicted / seconds:.2f} |")
                print(lines[-1], flush=True)
            shutil.rmtree(folder)
    print(f"wrote {write_report('predicted-time', chr(10).join(['# Predicted time', '', described, '', *lines]), options.out)}")


if __name__ == "__main__":
    main()
