"""One DPO step of ours beside TRL's DPOTrainer, on the same start model, pairs and batches: seconds, peak memory, and the loss of every step.

    python benchmarks/dpo_step.py [--peer-python .venv-peer/bin/python] [--steps 12] [--threads 1] [--work-loads sort large]

Ours is a run of ``recipes/dpo.yaml`` by the command; a step is all that it does from one row of ``metrics.jsonl`` to the next. TRL's is what lies between
its ``on_step_begin`` and ``on_step_end``. Both compute the reference's log-probabilities before the first step (TRL: ``precompute_ref_log_probs``), take the
pairs in the same order with the same tokens (asserted) and the same constant learning rate, so that the losses must agree, step by step, but for the order of
sums. The sides are processes of their own that take turns, step by step. CPU seconds are those of all threads and child processes. The first step of each
side is not counted. The peak of memory is sampled in steps of their own after those that are timed; ``family_memory.py`` says what is counted.

The bound of a ratio of seconds is what it would be with nothing but the matrix products of the update, over the tokens of these pairs (a prompt once, but in
the gradients of the weights of the plain side), at the rate of torch's product measured between the steps (``bounds.py``).
"""

import json
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from bounds import FORWARD_AND_BACKWARD, forward_flops, least_s, with_bound
from family_memory import Bytes, peak_of
from grpo_step import start_of, take_steps
from machine import HERE, ROOT, Driven, best_and_median, machine, peer_python, write_ratios, write_report
from options import parser as shared_parser

from tandem.config.load import to_mapping
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import load_config
from tandem.jobs.data_run.train_data import open_datasets, open_stream
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.text.tokenizer import Tokenizer

OURS = {"tandem": False, "tandem, share_prompts": True}
MEMORY_STEPS = 2
SPEED_TARGET, MEMORY_TARGET = 2.5, 0.6


@dataclass(frozen=True)
class WorkLoad:
    """``digits``: of a prompt, least and most; ``pairs``: of a batch."""

    what: str
    digits: tuple[int, int]
    pairs: int
    learning_rate: float


WORK_LOADS = {
    "sort": WorkLoad("the sort recipe's warm model (1.3 million parameters), batches of 64 pairs of at most 14 tokens", (3, 6), 64, 1e-4),
    "large": WorkLoad("a model of 22 million parameters with random weights, batches of 16 pairs of about 80 tokens", (30, 50), 16, 1e-5),
}


@dataclass
class Side:
    """What was measured of one side: its losses from the first step on, its counted steps, and the peak of a step."""

    losses: list[float] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    peak: Bytes = field(default_factory=lambda: Bytes(0, 0, 0))

    def seconds(self, kind: str) -> tuple[float, float]:
        return best_and_median([step[kind] for step in self.steps])


@dataclass(frozen=True)
class Work:
    """The model's ``shapes``, and the tokens of the pairs of ``steps`` steps (prompt, chosen, rejected) in ``lengths``; ``rates`` of torch's matrix product
    between the steps."""

    shapes: ModelShapes
    steps: int
    lengths: list[tuple[int, int, int]]
    rates: list[dict[str, float]]

    def flops(self, *, share_prompts: bool) -> float:
        """Operations of the products of one step: the forward pass and the gradients of inputs need every prompt once at least; the gradients of weights are
        sums over both of its sequences, with ``share_prompts`` over it once."""
        return (FORWARD_AND_BACKWARD - 1) * self._forward_flops(share_prompts=True) + self._forward_flops(share_prompts=share_prompts)

    def _forward_flops(self, *, share_prompts: bool) -> float:
        """Operations of a forward pass of one step, with every prompt once or in both of its sequences. The last token of a sequence is never fed."""
        answers = sum(chosen + rejected for _, chosen, rejected in self.lengths)
        prompts, pairs = sum(prompt for prompt, _, _ in self.lengths), len(self.lengths)
        tokens, states = answers - 2 * pairs + (1 if share_prompts else 2) * prompts, answers - pairs * share_prompts
        return forward_flops(self.shapes, tokens, states) / self.steps


def write_pairs(load: WorkLoad, count: int, path: Path) -> None:
    """Writes ``count`` preference pairs: digits, the right order, and one with two digits exchanged or one misread."""
    draw = random.Random(0)
    path.parent.mkdir(parents=True)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            digits = [draw.randrange(10) for _ in range(draw.randint(*load.digits))]
            right = sorted(digits)
            wrong = list(right)
            place = draw.randrange(len(wrong))
            wrong[place] = (wrong[place] + draw.randint(1, 9)) % 10
            question, chosen, rejected = ("".join(map(str, each)) for each in (digits, right, wrong))
            file.write(json.dumps({"prompt": f"{question}=", "chosen": chosen, "rejected": rejected}) + "\n")


def run_recipe(load: WorkLoad, model: Path, folder: Path, steps: int, threads: int, share_prompts: bool) -> PretrainRecipe:
    """The recipe of our run: no evaluation and no checkpoint in the counted steps."""
    recipe = load_config(ROOT / "recipes" / "dpo.yaml", [
        f"model.path={model.resolve()}", f"data.train=[{{path: {(folder / 'pairs').resolve()}}}]", "data.held_out=", "data.sequence_length=128",
        f"data.global_batch_size={load.pairs}", f"trainer.learning_rate={load.learning_rate}", "trainer.warmup_steps=0",
        "evaluation.every_steps=1000000", "checkpoint.every_steps=1000000", f"machine.threads={threads}",
        f"run.directory={(folder / 'runs').resolve()}", f"run.name=run-{share_prompts}", f"run.max_steps={steps}", f"trainer.share_prompts={share_prompts}",
    ])  # fmt: skip
    assert isinstance(recipe, PretrainRecipe)
    return recipe


def write_order(recipe: PretrainRecipe, model: Path, steps: int, path: Path) -> list[tuple[int, int, int]]:
    """Writes the pairs in the order in which our run takes them, as texts and as tokens. Returns the tokens of each (prompt, chosen, rejected)."""
    ((_, files),) = open_datasets(recipe.data)
    stream = open_stream(files, recipe.data.sequence_length, recipe.run.seed, examples=True, each=2)
    tokenizer, lengths = Tokenizer.from_folder(model), list[tuple[int, int, int]]()
    with path.open("w", encoding="utf-8") as file:
        for index in range(steps * recipe.data.global_batch_size):
            row: dict[str, Any] = {}
            for name, piece in zip(("chosen", "rejected"), stream.sequence(index), strict=True):  # type: ignore[arg-type]
                tokens, learned = list(piece.tokens), list(piece.learned or ())
                start = learned.index(1)
                row |= {"prompt": tokenizer.decode(tokens[:start]), name: tokenizer.decode(tokens[start:-1]), f"{name}_token_ids": tokens}
            lengths.append((start, len(row["chosen_token_ids"]) - start, len(row["rejected_token_ids"]) - start))
            file.write(json.dumps(row) + "\n")
    return lengths


def measure(name: str, work: Path, peer: str, threads: int, steps: int) -> tuple[dict[str, Side], Work]:
    """The counted steps of each side, taken in turn, and what they had to do."""
    load, model, whole = WORK_LOADS[name], start_of(name, work), 1 + steps + MEMORY_STEPS
    with tempfile.TemporaryDirectory(dir=work) as temporary, ExitStack() as stack:
        folder = Path(temporary)
        write_pairs(load, load.pairs * (whole + 1), folder / "texts" / "pairs.jsonl")
        tokenize = [sys.executable, "-m", "tandem.cli.main", "tokenize", folder / "texts", folder / "pairs", "--pairs", "--tokenizer", model]
        subprocess.run(list(map(str, tokenize)), check=True, stdout=sys.stderr)
        commands: dict[str, list[str | Path]] = {}
        for side, shares in OURS.items():
            recipe, own = run_recipe(load, model, folder, whole + 1, threads, shares), folder / f"ours-{shares}"
            own.mkdir()
            (own / "config.yaml").write_text(yaml.safe_dump(to_mapping(recipe), sort_keys=False), encoding="utf-8")
            commands[side] = [sys.executable, HERE / "peers" / "tandem_run.py", own]
        lengths = write_order(recipe, model, whole, folder / "order.jsonl")
        made = Work(read_shapes(model), steps, lengths[load.pairs : load.pairs * (steps + 1)], [])
        trainer = recipe.trainer
        settings = {
            "threads": threads, "output": str(folder / "output"), "batch": load.pairs, "micro_batches": 1, "beta": recipe.algorithm.beta,
            "learning_rate": trainer.learning_rate, "beta1": trainer.beta1, "beta2": trainer.beta2, "weight_decay": trainer.weight_decay,
            "max_grad_norm": trainer.max_grad_norm,
        }  # fmt: skip
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        commands["TRL"] = [peer, HERE / "peers" / "trl_dpo.py", model, folder / "order.jsonl", folder / "settings.json"]
        driven = {
            side: stack.enter_context(Driven(side, command, threads, work / f"dpo-step-{number}.log"))
            for number, (side, command) in enumerate(commands.items())
        }
        rate = stack.enter_context(Driven("matrix rate", [sys.executable, HERE / "peers" / "matrix_rate.py"], threads, work / "dpo-step-rate.log"))
        sides = {side: Side() for side in driven}
        for side, process in driven.items():
            # Our first step was taken when the side answered.
            sides[side].losses.append((process.ready if side in OURS else process.ask("step"))["loss"])
        for step in range(steps):
            made.rates.append(rate.ask("rate"))
            for side, process in driven.items():
                took = process.ask("step")
                sides[side].steps.append(took)
                sides[side].losses.append(took["loss"])
                print(f"{name}, threads {threads}, step {step}, {side}: {took}", file=sys.stderr, flush=True)
        for side, process in driven.items():
            sides[side].peak = peak_of(process.process.pid, partial(take_steps, process, MEMORY_STEPS)).peak
    return sides, made


def tables(name: str, threads: int, sides: dict[str, Side], made: Work, promises: list[dict[str, Any]]) -> list[str]:
    """The part of the report of one work load; appends to ``promises``."""
    lines = [f"## {name}, {threads} thread{'s' if threads > 1 else ''}", ""]
    lines += ["| side | CPU s | wall s | peak MiB | private | shared memory | libraries |", "|---|---|---|---|---|---|---|"]
    for side, found in sides.items():
        cpu, wall = (" / ".join(f"{value:.3f}" for value in found.seconds(kind)) for kind in ("cpu_s", "wall_s"))
        peak = found.peak
        sizes = " | ".join(f"{size / 2**20:,.0f}" for size in (peak.total, peak.anonymous, peak.shared_files, peak.mapped_files))
        lines.append(f"| {side} | {cpu} | {wall} | {sizes} |")
    theirs, kind = sides["TRL"], "cpu_s" if threads == 1 else "wall_s"
    lines += ["", "| TRL over ours | CPU s | wall s | peak memory, ours over TRL's | losses apart, relative: most, first step, last |", "|---|---|---|---|---|"]
    bounds: list[str] = []
    for side, shares in OURS.items():
        ours = sides[side]
        ratios = {clock: [b / a for a, b in zip(ours.seconds(clock), theirs.seconds(clock), strict=True)] for clock in ("cpu_s", "wall_s")}
        memory = ours.peak.total / theirs.peak.total
        cells = [f"**{best:.2f}** / {median:.2f}" for best, median in ratios.values()]
        apart = [abs(a / b - 1) for a, b in zip(ours.losses, theirs.losses, strict=True)]
        lines.append(f"| {side} | {cells[0]} | {cells[1]} | **{memory:.2f}** | {max(apart):.1e}, {apart[0]:.1e}, {apart[-1]:.1e} |")
        what = f"DPO step, {name}, {side}, {'CPU' if threads == 1 else 'wall'} seconds, {threads} thread{'s' if threads > 1 else ''}"
        promises.append({"what": what, "ratio": ratios[kind][0], "median": ratios[kind][1], "target": SPEED_TARGET})
        flops = made.flops(share_prompts=shares)
        fastest = least_s(flops, made.rates, kind)
        promises[-1]["bound"] = theirs.seconds(kind)[0] / fastest
        bounds.append(f"| {side} | {flops / 1e9:.1f} | {fastest:.4f} | {with_bound(promises[-1])} |")
        promises.append({"what": f"DPO step, {name}, {side}, peak memory", "ratio": memory, "target": MEMORY_TARGET, "at_most": True})
    fast = max(each[kind] for each in made.rates) / 1e9
    lines += ["", f"Products at {fast:.0f} GFLOP/s; ratio of {'CPU' if kind == 'cpu_s' else 'wall'} seconds, if there were nothing else:", ""]
    lines += ["| side | GFLOP a step | s | bound | share of it |", "|---|---|---|---|---|", *bounds]
    steps = range(len(theirs.losses))
    lines += ["", "| loss of step | " + " | ".join(map(str, steps)) + " |", "|---|" + "---|" * len(steps)]
    lines += [f"| {side} | " + " | ".join(f"{loss:.6f}" for loss in found.losses) + " |" for side, found in sides.items()]
    return [*lines, ""]


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=(1,), peer=True, work="the start models are")
    parser.add_argument("--steps", type=int, default=12, help="counted steps of each side")
    parser.add_argument("--work-loads", nargs="+", choices=sorted(WORK_LOADS), default=["sort", "large"])
    options = parser.parse_args()
    peer, described = peer_python(options.peer_python), machine()
    options.work.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    promises: list[dict[str, Any]] = []
    for name in options.work_loads:
        for threads in options.threads:
            lines += tables(name, threads, *measure(name, options.work, peer, threads, options.steps), promises)
    text = "\n".join([
        "# A DPO step beside TRL 1.16", "", described, "", *(__doc__ or "").split("\n\n")[2:],
        *(f"- {name}: {WORK_LOADS[name].what}." for name in options.work_loads), "",
        f"Best / median of {options.steps} steps a side, interleaved step by step in one run. OMP_NUM_THREADS and GOMP_SPINCOUNT are the same on both sides.",
        "", *lines,
    ])  # fmt: skip
    print(text)
    print(f"wrote {write_report('dpo-step', text, options.out)}")
    write_ratios("dpo_step", promises, options.work)


if __name__ == "__main__":
    main()
