"""How much of a slow reward hides behind the rollout, and what a busy reward costs the rollout.

    python benchmarks/reward_overlap.py [--steps 6] [--rounds 3]

Runs of `tandem train` on a model of random weights, whose completions end at random lengths, with rewards that are all 1, so that the weights stay as they
are. *Slow*: a reward waits 50 ms for each sample, in as many workers as keep up with the rollout (`samples * 50 ms / seconds of the rollout alone`, and one):
the seconds that the run waits for rewards after the last sample, beside the 50 ms of one reward. *Busy*: one worker computes during the whole rollout;
the seconds of the rollout beside those of the same rollout with a reward that does nothing, in turns. The rows are those of ``metrics.jsonl``.
"""

import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import ROOT, machine, write_report
from options import parser as shared_parser
from start_model import recipe_with

from tandem.model.create_model import create_model
from tandem.runtime.records.metrics import read_rows

REWARD_S = 0.05
PROMPTS, GROUP, MAX_TOKENS = 32, 4, 384
REWARDS = f"""
import time

def nothing(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({REWARD_S})
    return 1.0

def busy(data_source, solution_str, ground_truth, extra_info=None):
    ends = time.perf_counter() + {REWARD_S}
    while time.perf_counter() < ends:
        pass
    return 1.0
"""
RECIPE = """
model: {{path: {folder}/model}}
task: {{name: sort}}
rollout: {{prompts_per_step: {prompts}, max_tokens: {tokens}}}
algorithm: {{group_size: {group}, kl_coef: 0.0}}
trainer: {{weight_decay: 0.0}}
rewards: {{workers: {workers}, functions: [{{function: "{folder}/rewards.py:{function}"}}]}}
evaluation: {{every_steps: 1000, prompts: 1, final_prompts: 1}}
checkpoint: {{every_steps: 1000}}
run: {{max_steps: {steps}, name: run, directory: {folder}/{name}}}
"""


def rows_of(folder: Path, name: str, function: str, workers: int, steps: int) -> list[dict[str, float]]:
    """Returns the rows of a run but the first, in which processes warm up."""
    (folder / name).mkdir()
    path = folder / f"{name}.yaml"
    text = RECIPE.format(prompts=PROMPTS, tokens=MAX_TOKENS, group=GROUP, workers=workers, folder=folder, function=function, steps=steps, name=name)
    path.write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "tandem.cli.main", "train", str(path)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return read_rows(folder / name / "run" / "metrics.jsonl")[1:]


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3, help="runs alone and beside a busy reward, in turns")
    options = parser.parse_args()
    described = machine()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
        create = recipe_with(["model.create.max_position_embeddings=512"]).model.create
        assert create is not None
        create_model(create, 0, folder / "model")
        alone_s, beside_s, hidden = [], [], []
        for number in range(options.rounds):
            alone_s += [row["timing_s/rollout"] for row in rows_of(folder, f"alone-{number}", "nothing", 1, options.steps)]
            busy = rows_of(folder, f"busy-{number}", "busy", 1, options.steps)
            beside_s += [row["timing_s/rollout"] for row in busy]
            hidden += [row["reward_s/busy/total"] for row in busy]
        samples, rollout_s = PROMPTS * GROUP, statistics.median(alone_s)
        workers = math.ceil(samples * REWARD_S / rollout_s) + 1
        slow = rows_of(folder, "slow", "slow", workers, options.steps * 2)
    waited, total = (statistics.median(row[key] for row in slow) for key in ("timing_s/reward", "reward_s/slow/total"))
    tail, beside = statistics.median(row["reward_s/slow/tail"] for row in slow), statistics.median(beside_s)
    length = statistics.mean(row["response_length/mean"] for row in slow)
    lines = [
        "# Rewards beside the rollout", "", described, "",
        f"{samples} samples a step ({PROMPTS} prompts x {GROUP}, up to {MAX_TOKENS} tokens, mean {length:.0f}); "
        "medians over steps.", "",
        "| | measured | target |", "| --- | --- | --- |",
        f"| rollout alone | {rollout_s:.2f} s | |",
        f"| rollout with the slow reward in {workers} workers | {statistics.median(row['timing_s/rollout'] for row in slow):.2f} s | |",
        f"| time in the slow reward, {REWARD_S * 1000:.0f} ms a sample | {total:.2f} s | |",
        f"| of it hidden | {1 - tail / total:.1%} | |",
        f"| wait after the last sample, in rewards of {REWARD_S * 1000:.0f} ms | {waited / REWARD_S:.2f} | about 1 |",
        f"| rollout beside a busy reward ({statistics.median(hidden):.2f} s of work), of its time alone | {beside / rollout_s:.2f}x | at most 1.3x |",
    ]  # fmt: skip
    print("\n".join(lines))
    print(f"wrote {write_report('reward-overlap', chr(10).join(lines), options.out)}")


if __name__ == "__main__":
    main()
