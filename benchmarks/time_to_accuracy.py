"""Seconds of training from the same warm start to a held-out sampled accuracy: ours beside TRL's, on three tasks and three seeds each.

    python benchmarks/time_to_accuracy.py [--peer-python .venv-peer/bin/python] [--threads 1] [--tasks sort addition spell_backward] [--seeds 0 1 2]

The tasks are those of recipes/sort.yaml, arithmetic.yaml and reasoning_gym.yaml. The accuracy to reach on sort is the recipe's, 0.90. On the others a run
of the recipe from the same start model ended below the recipe's target, so it is what that run had on fresh prompts after its 150 steps, less two standard
errors of an evaluation, down to a multiple of 0.05: on addition 0.707 - 2 x 0.028 (docs/results/answer_matcher.md, seed 0), so 0.65; on spell_backward
0.861 - 2 x 0.022, so 0.80. A side that is not there after ``--steps`` has not reached it. On sort each side has the best settings known
for it: ours the recipe's, TRL's a learning rate of 5e-4 with 10 warm-up steps, KL 0.02 and beta2 0.99; on the others both have the recipe's. Ours computes a
group's prompt once in training (``trainer.share_prompts``). A task has one start model; a seed has its own prompts and samples. The batch (32 prompts x 8
samples), the prompts of every step and the reward of a completion are the same.

Both are processes of their own that take turns, step by step, until both are there; ours has the two workers of a pod in one process. Every 5 steps each side's
weights are evaluated on the same 256 held-out prompts with our engine, with the same random numbers; evaluation, saving and starting are counted for
neither. The target counts as reached at the first of two evaluations in a row at or above it, and the first single one is reported too. Each race is kept
in ``--work`` when it ends, and is not run again.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from machine import HERE, ROOT, Driven, machine, peer_python, write_ratios, write_report
from options import parser as shared_parser
from start_model import judge_of, recipe_with, warm_model, write_peer_settings, write_prompts, write_run

from tandem.config.recipe import Recipe
from tandem.engine.llm import LLM
from tandem.evaluation.tasks import evaluate
from tandem.pod.prompts import prompt_source
from tandem.rl.rewards.pool import RewardPool
from tandem.rl.rollout.dispatch import evaluation_settings, request_key
from tandem.rl.rollout.groups import samples_of, sampling_params
from tandem.types import Prompt, Sample, Score

sys.path.insert(0, str(HERE / "peers"))
from judges import JUDGES

EVERY, PROMPTS, GAIN = 5, 256, 2.0
Point = tuple[int, float, float, float]
"""Of an evaluation: step, accuracy, CPU and wall seconds so far."""


@dataclass(frozen=True)
class Race:
    """A task: its recipe, the accuracy to reach, and what TRL is told beyond the recipe."""

    recipe: Path
    target: float
    peer: tuple[str, ...] = ()


TASKS = {
    "sort": Race(
        ROOT / "recipes" / "sort.yaml", 0.90,
        ("trainer.learning_rate=5e-4", "trainer.warmup_steps=10", "trainer.beta2=0.99", "algorithm.kl_coef=0.02"),
    ),
    "addition": Race(ROOT / "recipes" / "arithmetic.yaml", 0.65),
    "spell_backward": Race(ROOT / "recipes" / "reasoning_gym.yaml", 0.80),
}  # fmt: skip


@dataclass
class Runner:
    """One side's way to ``target``: seconds so far, and what its evaluations found."""

    name: str
    target: float
    cpu_s: float = 0.0
    wall_s: float = 0.0
    points: list[Point] = field(default_factory=list)

    def first(self) -> Point | None:
        """The first evaluation that reached the target."""
        return next((point for point in self.points if point[1] >= self.target), None)

    def stable(self) -> Point | None:
        """The first of two in a row that did."""
        pairs = zip(self.points, self.points[1:], strict=False)
        return next((one for one, two in pairs if one[1] >= self.target and two[1] >= self.target), None)


def accuracy(recipe: Recipe, folder: Path, prompts: Sequence[Prompt], rewards: RewardPool) -> float:
    """Sampled accuracy of the model in ``folder``; every call draws with the same random numbers."""
    llm, settings = LLM(folder), evaluation_settings(recipe.rollout, recipe.run.seed, greedy=False, purpose="benchmark")

    def generate(asked: Sequence[Prompt]) -> list[Sample]:
        keys = [request_key(0, prompt.id, "benchmark") for prompt in asked]
        tokens = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in asked]
        return samples_of(0, asked, llm.generate(tokens, sampling_params(settings), use_tqdm=False, request_keys=keys))

    def judge(samples: Sequence[Sample], asked: Sequence[Prompt]) -> Sequence[Score]:
        scores, truths = rewards.score(samples, asked), {prompt.id: str(prompt.ground_truth) for prompt in asked}
        theirs = [JUDGES[judge_of(recipe)](sample.text, truths[sample.prompt_id]) for sample in samples]
        assert [score.value for score in scores] == theirs, "the two sides give other rewards"
        return scores

    return evaluate(generate, prompts, judge).accuracy


def run(task: str, seed: int, work: Path, peer: str, options: argparse.Namespace) -> list[Runner]:
    """The race of ``task`` with ``seed``."""
    race = TASKS[task]
    model = warm_model(work, path=race.recipe)
    common = [f"run.seed={seed}", f"machine.threads={options.threads}"]
    recipe = recipe_with([*common, "trainer.share_prompts=true"], race.recipe)
    told = recipe_with([*common, *race.peer], race.recipe)
    with (
        tempfile.TemporaryDirectory(dir=work) as name, closing(prompt_source(recipe, model)) as source, RewardPool(recipe.rewards) as rewards,
    ):
        folder = Path(name)
        directory, settings = write_run(recipe, folder / "ours"), write_peer_settings(told, folder / "peer", options.threads)
        prompts, held_out = write_prompts(recipe, model, options.steps + 1, folder / "prompts.jsonl"), source.held_out(PROMPTS)
        ours = [sys.executable, HERE / "peers" / "tandem_grpo.py", model, prompts, directory]
        theirs = [peer, HERE / "peers" / "trl_grpo.py", model, prompts, settings]
        start, log = accuracy(recipe, model, held_out, rewards), f"{task}-{seed}.log"
        with (
            Driven("tandem", ours, options.threads, work / f"tta-ours-{log}") as a, Driven("TRL", theirs, options.threads, work / f"tta-trl-{log}") as b,
        ):
            sides = [(Runner("tandem", race.target), a), (Runner("TRL", race.target), b)]
            for runner, _ in sides:
                runner.points.append((0, start, 0.0, 0.0))
            for step in range(1, options.steps + 1):
                running = [side for side in sides if side[0].stable() is None]
                if not running:
                    break
                for runner, driven in running:
                    took = driven.ask("step")
                    runner.cpu_s, runner.wall_s = runner.cpu_s + took["cpu_s"], runner.wall_s + took["wall_s"]
                    if step % EVERY == 0:
                        saved = folder / f"{runner.name}-{step}"
                        driven.ask(f"save {saved}")
                        runner.points.append((step, accuracy(recipe, saved, held_out, rewards), runner.cpu_s, runner.wall_s))
                        print(f"{task}, seed {seed}, {runner.name}: {runner.points[-1]}", file=sys.stderr, flush=True)
    return [runner for runner, _ in sides]


def raced(task: str, seed: int, peer: str, options: argparse.Namespace) -> tuple[list[Runner], list[float | str]]:
    """The race of ``task`` with ``seed``, from the work directory if it was run before, and the load averages when it began and ended."""
    kept = options.work / f"time-to-accuracy-{task}-{seed}-{options.threads}.json"
    if not kept.exists():
        began = os.getloadavg()[0]
        found = run(task, seed, options.work, peer, options)
        load = {"load averages": [round(began, 1), round(os.getloadavg()[0], 1)]}
        kept.write_text(json.dumps({runner.name: runner.points for runner in found} | load), encoding="utf-8")
    race = json.loads(kept.read_text(encoding="utf-8"))
    sides = [Runner(name, TASKS[task].target, points=[tuple(point) for point in race[name]]) for name in ("tandem", "TRL")]
    return sides, race.get("load averages", ["not recorded"])


def describe(point: Point | None) -> list[str]:
    return [str(point[0]), f"{point[2]:.1f}", f"{point[3]:.1f}"] if point else ["not reached"] * 3


def ratios_of(ours: Runner, theirs: Runner) -> tuple[float, float]:
    """TRL's CPU and wall seconds over ours; 0 where ours did not get there. A side that never gets there has needed at least all the seconds it took."""
    reached, ends = ours.stable(), theirs.stable() or theirs.points[-1]
    return (ends[2] / reached[2], ends[3] / reached[3]) if reached else (0.0, 0.0)


def step_ratio(ours: Runner, theirs: Runner) -> float:
    """CPU seconds of TRL's mean step over ours. What the ratio to the target has beyond it comes from the number of steps, which differs by chance."""
    return (theirs.points[-1][2] / theirs.points[-1][0]) / (ours.points[-1][2] / ours.points[-1][0])


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=1, peer=True, work="the start models and the races are")
    parser.add_argument("--steps", type=int, default=150, help="at most")
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    peer, described = peer_python(options.peer_python), machine()
    options.work.mkdir(parents=True, exist_ok=True)
    rows, curves, loads, summary, promises = [], [], [], [], []
    for task in options.tasks:
        found: list[tuple[float, float]] = []
        of_steps: list[float] = []
        for seed in options.seeds:
            (ours, theirs), load = raced(task, seed, peer, options)
            for runner in (ours, theirs):
                best = f"{max(point[1] for point in runner.points):.3f}"
                rows.append("| " + " | ".join([task, str(seed), runner.name, *describe(runner.stable()), *describe(runner.first()), best]) + " |")
            found.append(ratios_of(ours, theirs))
            of_steps.append(step_ratio(ours, theirs))
            bound = "" if theirs.stable() else " at least (TRL did not reach the target)"
            rows.append(f"| {task} | {seed} | **TRL / tandem**{bound} | | **{found[-1][0]:.2f}** | {found[-1][1]:.2f} | | | | |")
            by_step = [{point[0]: point[1] for point in runner.points} for runner in (ours, theirs)]
            loads.append(f"{task}, seed {seed}: {' to '.join(map(str, load))}")
            every = sorted({step for side in by_step for step in side})
            for runner, side in zip((ours, theirs), by_step, strict=True):
                curves.append(f"{task}, seed {seed}, {runner.name}: " + ", ".join(f"{step}: {side[step]:.3f}" for step in every if step in side) + ".")
        middle = [statistics.median(ratio[place] for ratio in found) for place in (0, 1)]
        seeds, steps = (", ".join(f"{ratio:.2f}" for ratio in ratios) for ratios in ([ratio[0] for ratio in found], of_steps))
        summary.append(f"| {task} | {TASKS[task].target:g} | **{middle[0]:.2f}** | {seeds} | {middle[1]:.2f} | {steps} |")
        promises.append({"what": f"time to {TASKS[task].target:g}, {task}, median of seeds, CPU seconds", "ratio": middle[0], "target": GAIN})
    text = "\n".join([
        "# Time to a held-out sampled accuracy, beside TRL 1.16", "", described, "", *(__doc__ or "").split("\n\n")[2:],
        f"{options.threads} thread{'s' if options.threads > 1 else ''}. TRL's seconds over ours, by seed:", "",
        "| task | target | CPU, median | CPU, each seed | wall, median | CPU of a mean step, each seed |", "|---|---|---|---|---|---|", *summary, "",
        "| task | seed | side | steps to two in a row | CPU s | wall s | steps to the first | CPU s | wall s | best accuracy |",
        "|---|---|---|---|---|---|---|---|---|---|", *rows, "",
        f"Load averages when a race began and ended: {'; '.join(loads)}.", "", "Accuracy by step:", "", *(f"- {curve}" for curve in curves), "",
    ])  # fmt: skip
    print(text)
    print(f"wrote {write_report('time-to-accuracy', text, options.out)}")
    write_ratios("time_to_accuracy", promises, options.work)


if __name__ == "__main__":
    main()
