"""Seconds of training from the same warm start to 0.90 held-out sampled accuracy: ours beside TRL's.

    python benchmarks/time_to_accuracy.py [--peer-python .venv-peer/bin/python] [--threads 1] [--steps 150] [--seed 0]

Each side has the best settings known for it: ours the sort recipe's, TRL's a learning rate of 5e-4 with 10 warm-up steps, KL
0.02 and beta2 0.99. The batch (32 prompts x 8 samples) and the prompts of every step are the same. Both are processes of
their own that take turns, step by step, until both are there. Every 5 steps each side's weights are evaluated on the same 256
held-out prompts with our engine, with the same random numbers; evaluation, saving and starting are counted for neither. The
target counts as reached at the first of two evaluations in a row at or above it, and the first single one is reported too.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from machine import HERE, Driven, machine, peer_python, write_ratios, write_report
from options import parser as shared_parser
from start_model import recipe_with, warm_model, write_peer_settings, write_prompts, write_run

from tandem.config.recipe import Recipe
from tandem.engine.llm import LLM
from tandem.evaluation.tasks import evaluate
from tandem.pod.prompts import prompt_source
from tandem.rl.rewards.pool import RewardPool
from tandem.rl.rollout.dispatch import evaluation_settings, request_key
from tandem.rl.rollout.groups import samples_of, sampling_params
from tandem.types import Prompt, Sample

TARGET, EVERY, PROMPTS, MOST = 0.90, 5, 256, 0.5
TRL_BEST = ["trainer.learning_rate=5e-4", "trainer.warmup_steps=10", "trainer.beta2=0.99", "algorithm.kl_coef=0.02"]
PEER_SETTINGS = {"best": TRL_BEST, "recipe": []}
"""What TRL is told beyond the sort recipe."""


@dataclass
class Race:
    """One side's way to the target: seconds so far, and (step, accuracy, CPU seconds, wall seconds) of each evaluation."""

    name: str
    side: Driven
    cpu_s: float = 0.0
    wall_s: float = 0.0
    points: list[tuple[int, float, float, float]] = field(default_factory=list)

    def first(self) -> tuple[int, float, float, float] | None:
        """The first evaluation that reached the target."""
        return next((point for point in self.points if point[1] >= TARGET), None)

    def stable(self) -> tuple[int, float, float, float] | None:
        """The first of two in a row that did."""
        pairs = zip(self.points, self.points[1:], strict=False)
        return next((one for one, two in pairs if one[1] >= TARGET and two[1] >= TARGET), None)


def accuracy(recipe: Recipe, folder: Path, prompts: Sequence[Prompt], rewards: RewardPool) -> float:
    """Sampled accuracy of the model in ``folder``; every call draws with the same random numbers."""
    llm, settings = LLM(folder), evaluation_settings(recipe.rollout, recipe.run.seed, greedy=False, purpose="benchmark")

    def generate(asked: Sequence[Prompt]) -> list[Sample]:
        keys = [request_key(0, prompt.id, "benchmark") for prompt in asked]
        tokens = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in asked]
        return samples_of(0, asked, llm.generate(tokens, sampling_params(settings), use_tqdm=False, request_keys=keys))

    return evaluate(generate, prompts, rewards.score).accuracy


def run(model: Path, work: Path, peer: str, options: argparse.Namespace) -> list[Race]:
    common = [f"run.seed={options.seed}", f"machine.threads={options.threads}"]
    recipe, best = recipe_with(common), recipe_with([*common, *PEER_SETTINGS[options.peer_settings]])
    with (
        tempfile.TemporaryDirectory(dir=work) as name, closing(prompt_source(recipe, model)) as source, RewardPool(recipe.rewards) as rewards,
    ):
        folder = Path(name)
        directory, settings = write_run(recipe, folder / "ours"), write_peer_settings(best, folder / "peer", options.threads)
        prompts, held_out = write_prompts(recipe, model, options.steps + 1, folder / "prompts.jsonl"), source.held_out(PROMPTS)
        ours = [sys.executable, HERE / "peers" / "tandem_grpo.py", model, prompts, directory]
        theirs = [peer, HERE / "peers" / "trl_grpo.py", model, prompts, settings]
        start = accuracy(recipe, model, held_out, rewards)
        with Driven("tandem", ours, options.threads, work / "tta_ours.log") as a, Driven("TRL", theirs, options.threads, work / "tta_trl.log") as b:
            races = [Race("tandem", a), Race("TRL", b)]
            for race in races:
                race.points.append((0, start, 0.0, 0.0))
            for step in range(1, options.steps + 1):
                running = [race for race in races if race.stable() is None]
                if not running:
                    break
                for race in running:
                    took = race.side.ask("step")
                    race.cpu_s, race.wall_s = race.cpu_s + took["cpu_s"], race.wall_s + took["wall_s"]
                    if step % EVERY == 0:
                        saved = folder / f"{race.name}-{step}"
                        race.side.ask(f"save {saved}")
                        race.points.append((step, accuracy(recipe, saved, held_out, rewards), race.cpu_s, race.wall_s))
                        print(f"{race.name}: {race.points[-1]}", file=sys.stderr, flush=True)
    return races


def describe(point: tuple[int, float, float, float] | None) -> list[str]:
    return [str(point[0]), f"{point[2]:.1f}", f"{point[3]:.1f}"] if point else ["not reached"] * 3


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=1, peer=True, work="the start model is")
    parser.add_argument("--steps", type=int, default=150, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer-settings", choices=sorted(PEER_SETTINGS), default="best", help="TRL's own, or the sort recipe's")
    options = parser.parse_args()
    peer, described = peer_python(options.peer_python), machine()
    options.work.mkdir(parents=True, exist_ok=True)
    races = run(warm_model(options.work), options.work, peer, options)
    (options.work / f"time_to_accuracy-{options.seed}.json").write_text(json.dumps({race.name: race.points for race in races}), encoding="utf-8")
    lines = ["| side | steps to two in a row | CPU s | wall s | steps to the first | CPU s | wall s | best accuracy |", "|---|---|---|---|---|---|---|---|"]
    for race in races:
        cells = [race.name, *describe(race.stable()), *describe(race.first()), f"{max(point[1] for point in race.points):.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    ours, theirs = races
    reached = ours.stable()
    # A side that never gets there has needed at least all the seconds it took.
    ends = theirs.stable() or theirs.points[-1]
    bound = "" if theirs.stable() else " at least (TRL did not reach the target)"
    if reached:
        ratios = (ends[2] / reached[2], ends[3] / reached[3])
        lines += ["", f"TRL's seconds over ours{bound}: CPU **{ratios[0]:.2f}**, wall **{ratios[1]:.2f}**; steps {ends[0]} over {reached[0]}."]
    else:
        ratios = (0.0, 0.0)
        lines += ["", f"Ours did not reach {TARGET} in {options.steps} steps."]
    curves = ["| step | tandem | TRL |", "|---|---|---|"]
    by_step = [{point[0]: point[1] for point in race.points} for race in races]
    for step in sorted({step for found in by_step for step in found}):
        curves.append(f"| {step} | " + " | ".join(f"{found[step]:.3f}" if step in found else "" for found in by_step) + " |")
    told = ", ".join(PEER_SETTINGS[options.peer_settings]) or "the same"
    text = "\n".join([
        f"# Time to {TARGET:.2f} held-out sampled accuracy", "", described, "",
        f"{options.threads} thread{'s' if options.threads > 1 else ''}, seed {options.seed}, the same warm start, 32 prompts x 8 samples a step and the "
        f"same prompts, taken in turn. Ours: recipes/sort.yaml; TRL: {told}. Evaluated every {EVERY} steps on the same "
        f"{PROMPTS} prompts with the same random numbers; evaluation, saving and starting count for neither.", "", *lines, "", *curves,
    ])
    print(text)
    print(f"wrote {write_report('time-to-accuracy', text, options.out)}")
    promise = {"what": f"time to {TARGET:.2f}, {{}} seconds, {options.threads} threads", "target": 1 / MOST}
    rows = [{**promise, "what": promise["what"].format(kind), "ratio": ratio} for kind, ratio in zip(("CPU", "wall"), ratios, strict=True)]
    write_ratios("time_to_accuracy", rows, options.work)


if __name__ == "__main__":
    main()
