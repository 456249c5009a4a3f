"""One GRPO step of ours beside TRL's, on the same start model and prompts: seconds, phases, peak memory.

    python benchmarks/grpo_step.py [--peer-python .venv-peer/bin/python] [--steps 8] [--threads 1 2] [--work-loads sort large]

Ours is a run of the command, with every process of its pod; a step is all that it does from one row of ``metrics.jsonl`` to the next (weights to the engine,
prompts, rollout, rewards in their own process, reference pass, update, journal). TRL's step is what lies between its ``on_step_begin`` and ``on_step_end``.
The sides are processes of their own that take turns, step by step, so that all meet the same neighbours. CPU seconds are those of all threads and child
processes. The first step of each side is not counted.

TRL takes its update in one pass or in as many passes as we have micro-batches, whichever is the faster; the ratio of seconds is against the faster one, that of
memory against the leaner one. The peak of memory is sampled in steps of their own after those that are timed; ``family_memory.py`` says what is counted.

The bound of a ratio is what it would be with nothing but the matrix products of a step (of the rollout, of the reference's pass, and three times a forward
pass for training, over the tokens that the steps had, but equal beginnings once wherever that leaves the order of sums as it is), at the rate of torch's
product measured between the steps; of memory, with nothing but the imports of one process, as our fork server has them, its libraries, and weights, gradients,
moments and reference (``bounds.py``).
"""

import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bounds import FORWARD_AND_BACKWARD, forward_flops, held_bytes, least_s, with_bound
from family_memory import Bytes, ProcessPages, by_process, peak_of
from machine import HERE, Driven, best_and_median, machine, peer_python, write_ratios, write_report
from options import parser as shared_parser
from start_model import recipe_with, warm_model, write_peer_settings, write_prompts, write_run

from tandem.config.recipe import Recipe
from tandem.layout.shapes import ModelShapes
from tandem.model.create_model import create_model
from tandem.model.huggingface.model_config import read_shapes

KL = {"on": 0.01, "off": 0.0}
PHASES = ("rollout", "inference", "rewards", "train", "weight update")
OURS = ("tandem", "tandem, share_prompts")
LARGE = (
    "model.create.hidden_size=512", "model.create.num_hidden_layers=8", "model.create.num_attention_heads=8", "model.create.num_key_value_heads=4",
    "model.create.head_dim=64", "model.create.intermediate_size=1536", "model.create.initializer_range=0.02", "task.min_digits=40", "task.max_digits=40",
    "rollout.prompts_per_step=8", "rollout.max_tokens=64", "trainer.learning_rate=1e-6",
)  # fmt: skip
"""A model of 22 million parameters, and prompts that are as long as its completions."""
WORK_LOADS = {"sort": (), "large": LARGE}
WHAT = {
    "sort": "the sort recipe's warm model (1.3 million parameters) and hyper-parameters, 32 prompts x 8 samples, up to 32 new tokens",
    "large": "a model of 22 million parameters with random weights, 8 prompts of about 50 tokens x 8 samples, up to 64 new tokens",
}
MEMORY_STEPS = 2
SPEED_TARGET, MEMORY_TARGET = {"tandem": 2.5, "tandem, share_prompts": 3.0}, 0.6


@dataclass
class Side:
    """What was measured of one side: its counted steps, the peak of a step, and the memory of each process between two."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    peak: Bytes = field(default_factory=lambda: Bytes(0, 0, 0))
    samples: int = 0
    processes: list[ProcessPages] = field(default_factory=list)

    def seconds(self, kind: str) -> tuple[float, float]:
        return best_and_median([step[kind] for step in self.steps])

    def phase(self, name: str, kind: str) -> float:
        return best_and_median([step[kind].get(name, 0.0) for step in self.steps])[1]

    @property
    def mean_length(self) -> float:
        return float(sum(step["mean_length"] for step in self.steps) / len(self.steps))

    @property
    def shared_share(self) -> float:
        return float(sum(step["shared_share"] for step in self.steps) / len(self.steps))


@dataclass(frozen=True)
class Work:
    """What every side of a setting has to do: the model's ``shapes``, ``prompts`` of ``prompt_tokens`` tokens on average with ``group`` samples each, and
    whether there is a ``reference``; ``rates`` of torch's matrix product between the steps."""

    shapes: ModelShapes
    prompts: int
    prompt_tokens: float
    group: int
    reference: bool
    rates: list[dict[str, float]]

    def flops(self, completion_tokens: float, common: float, *, share_prompts: bool) -> float:
        """Operations of the products of one step with completions of so many tokens on average. The last token of a sequence is never fed; a rollout computes
        the prompt of a group once. ``common``: of the tokens of all sequences, those that an earlier sequence begins with too, which are computed once by the
        reference and in training; without ``share_prompts`` the gradients of weights are summed over all tokens."""
        samples = self.prompts * self.group
        fed, states = samples * (completion_tokens - 1), samples * (completion_tokens - 1) + self.prompts
        drawn = forward_flops(self.shapes, fed + self.prompts * self.prompt_tokens, states)
        tokens = fed + samples * self.prompt_tokens
        once = tokens * (1 - common)
        shared = forward_flops(self.shapes, once, once - self.prompts * (self.prompt_tokens - 1))
        # The forward pass and the gradients of inputs need equal beginnings once at least; the gradients of weights are sums over all tokens.
        trained = FORWARD_AND_BACKWARD * shared if share_prompts else 2 * shared + forward_flops(self.shapes, tokens, samples * completion_tokens)
        return drawn + trained + self.reference * shared


def start_of(name: str, work: Path) -> Path:
    """The model that every side of a work load starts from."""
    if name == "sort":
        return warm_model(work)
    recipe, folder = recipe_with(LARGE), work / "grpo-step-large"
    if not (folder / "config.json").exists():
        assert recipe.model.create is not None
        create_model(recipe.model.create, 0, folder)
    return folder


def run_recipe(recipe: list[str], model: Path, folder: Path, steps: int, *, share_prompts: bool) -> Recipe:
    """The recipe of our run: from ``model``, without evaluations and checkpoints in the counted steps."""
    return recipe_with([
        *recipe, f"model.path={model.resolve()}", "model.create=null", "sft=null", f"trainer.share_prompts={share_prompts}",
        "evaluation.every_steps=1000000", "evaluation.prompts=1", "evaluation.final_prompts=1", "checkpoint.every_steps=1000000",
        f"run.directory={folder.resolve()}", "run.name=run", f"run.max_steps={steps}",
    ])  # fmt: skip


def take_steps(side: Driven, count: int) -> None:
    for _ in range(count):
        side.ask("step")


def measure(load: str, work: Path, peer: str, kl: float, threads: int, steps: int) -> tuple[dict[str, Side], Work]:
    """The counted steps of each side, taken in turn, and what they had to do."""
    model = start_of(load, work)
    changes = [change for change in WORK_LOADS[load] if not change.startswith("model.")]
    common = [*changes, f"algorithm.kl_coef={kl}", f"machine.threads={threads}"]
    whole = 1 + steps + MEMORY_STEPS
    with tempfile.TemporaryDirectory(dir=work) as name, ExitStack() as stack:
        folder = Path(name)
        plain = recipe_with(common)
        prompts = write_prompts(plain, model, whole + 1, folder / "prompts.jsonl")
        lengths = [len(json.loads(line)["prompt_token_ids"]) for line in prompts.read_text(encoding="utf-8").splitlines()]
        each = plain.rollout.prompts_per_step
        counted = lengths[each : each * (steps + 1)]
        made = Work(read_shapes(model), each, sum(counted) / len(counted), plain.algorithm.group_size, plain.algorithm.needs_reference, [])
        commands: dict[str, list[str | Path]] = {}
        for number, side in enumerate(OURS):
            own = folder / f"ours-{number}"
            recipe = run_recipe(common, model, own / "runs", whole + 1, share_prompts=side != "tandem")
            commands[side] = [sys.executable, HERE / "peers" / "tandem_run.py", write_run(recipe, own)]
        for passes in peer_passes(plain):
            settings = write_peer_settings(plain, folder / f"peer-{passes}", threads, passes)
            commands[f"TRL, {passes} pass{'es' if passes > 1 else ''}"] = [peer, HERE / "peers" / "trl_grpo.py", model, prompts, settings]
        driven = {
            side: stack.enter_context(Driven(side, command, threads, work / f"grpo-step-{number}.log"))
            for number, (side, command) in enumerate(commands.items())
        }
        rate = stack.enter_context(Driven("matrix rate", [sys.executable, HERE / "peers" / "matrix_rate.py"], threads, work / "grpo-step-rate.log"))
        sides = {side: Side() for side in driven}
        for step in range(steps + 1):
            made.rates.append(rate.ask("rate"))
            for side, process in driven.items():
                # Our first step was taken when the side answered that it is ready.
                took = process.ask("step") if step or not side.startswith("tandem") else {}
                if step:
                    sides[side].steps.append(took)
                print(f"{load}, threads {threads}, KL {kl:g}, step {step}, {side}: {took}", file=sys.stderr, flush=True)
        for side, process in driven.items():
            memory = peak_of(process.process.pid, partial(take_steps, process, MEMORY_STEPS))
            sides[side].peak, sides[side].samples = memory.peak, memory.samples
            sides[side].processes = by_process(process.process.pid)
            print(f"{load}, threads {threads}, KL {kl:g}, memory of {side}: {memory.peak}", file=sys.stderr, flush=True)
    return sides, made


def peer_passes(recipe: Recipe) -> list[int]:
    """In how many passes TRL takes its update: one, and as many as our micro-batches hold if all sequences have the greatest length."""
    sequences = recipe.rollout.prompts_per_step * recipe.algorithm.group_size
    longest = recipe.rollout.max_tokens + recipe.task.max_digits * 2
    passes = 1
    while sequences * longest / passes > recipe.trainer.micro_batch_tokens and passes < sequences:
        passes *= 2
    return sorted({1, passes})


def tables(load: str, threads: int, kl: str, sides: dict[str, Side], made: Work, promises: list[dict[str, Any]]) -> list[str]:
    """The part of the report of one setting; appends to ``promises``."""
    peers = {name: side for name, side in sides.items() if name.startswith("TRL")}
    ours = {name: side for name, side in sides.items() if name not in peers}
    lines = [f"## {load}, {threads} thread{'s' if threads > 1 else ''}, KL {kl}", ""]
    lines += ["| side | CPU s | wall s | tokens a completion | peak MiB | private | shared memory | libraries |", "|---|---|---|---|---|---|---|---|"]
    for name, side in sides.items():
        cpu, wall = (" / ".join(f"{value:.3f}" for value in side.seconds(kind)) for kind in ("cpu_s", "wall_s"))
        peak = side.peak
        sizes = " | ".join(f"{size / 2**20:,.0f}" for size in (peak.total, peak.anonymous, peak.shared_files, peak.mapped_files))
        lines.append(f"| {name} | {cpu} | {wall} | {side.mean_length:.2f} | {sizes} |")
    lines += ["", "| TRL over ours | CPU s | wall s | peak memory, ours over TRL's |", "|---|---|---|---|"]
    kind, bounds = "cpu_s" if threads == 1 else "wall_s", list[str]()
    common = max(side.shared_share for side in ours.values())
    for name, side in ours.items():
        ratios = {}
        for clock in ("cpu_s", "wall_s"):
            own, theirs = side.seconds(clock), [min(peer.seconds(clock)[place] for peer in peers.values()) for place in (0, 1)]
            ratios[clock] = (theirs[0] / own[0], theirs[1] / own[1])
        leanest = min(peer.peak.total for peer in peers.values())
        memory = side.peak.total / leanest
        cells = [f"**{best:.2f}** / {median:.2f}" for best, median in ratios.values()]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | **{memory:.2f}** |")
        flops = made.flops(side.mean_length, common, share_prompts=name != "tandem")
        fastest = least_s(flops, made.rates, kind)
        imports = max(each.own + each.common for each in side.processes if "fork_server" in each.name)
        held = held_bytes(made.shapes, imports + side.peak.mapped_files, made.reference)
        what = f"GRPO step, {load}, {name}, {'CPU' if threads == 1 else 'wall'} seconds, {threads} thread{'s' if threads > 1 else ''}, KL {kl}"
        promises.append({"what": what, "ratio": ratios[kind][0], "median": ratios[kind][1], "target": SPEED_TARGET[name]})
        promises[-1]["bound"] = ratios[kind][0] * side.seconds(kind)[0] / fastest
        promises.append({"what": f"GRPO step, {load}, {name}, peak memory, KL {kl}", "ratio": memory, "target": MEMORY_TARGET, "at_most": True})
        promises[-1]["bound"] = held / leanest
        bounds.append(f"| {name} | {flops / 1e9:.1f} | {fastest:.3f} | {with_bound(promises[-2])} | {held / 2**20:,.0f} | {with_bound(promises[-1])} |")
    rate = max(each[kind] for each in made.rates) / 1e9
    lines += ["", f"Products at {rate:.0f} GFLOP/s; ratio of {'CPU' if kind == 'cpu_s' else 'wall'} seconds and of memory, if there were nothing else:", ""]
    lines += ["| side | GFLOP a step | s | bound | share of it | MiB | bound | share of it |", "|---|---|---|---|---|---|---|---|", *bounds]
    lines += ["", f"{common:.0%} of the tokens of all sequences are those that an earlier one begins with too."]
    lines += ["", "CPU seconds of each phase, median:", "", "| side | " + " | ".join(PHASES) + " |", "|---|" + "---|" * len(PHASES)]
    for name, side in sides.items():
        lines.append(f"| {name} | " + " | ".join(f"{side.phase(phase, 'phase_cpu_s'):.3f}" for phase in PHASES) + " |")
    lines += ["", "Anonymous memory of each process between two steps, MiB:", "", "| side | process | share | own | in common |", "|---|---|---|---|---|"]
    for name, side in sides.items():
        for each in side.processes:
            lines.append(f"| {name} | {each.name} | " + " | ".join(f"{size / 2**20:,.0f}" for size in (each.share, each.own, each.common)) + " |")
    if any("mismatch_kl" in step for side in ours.values() for step in side.steps):
        largest = max(abs(step["mismatch_kl"]) for side in ours.values() for step in side.steps)
        lines += ["", f"Largest mismatch_kl of our steps: {largest:g}."]
    return [*lines, ""]


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=(1, 2), peer=True, work="the start models are")
    parser.add_argument("--steps", type=int, default=8, help="counted steps of each side")
    parser.add_argument("--kl", nargs="+", choices=sorted(KL), default=["off", "on"])
    parser.add_argument("--work-loads", nargs="+", choices=sorted(WORK_LOADS), default=["sort"])
    options = parser.parse_args()
    peer, described = peer_python(options.peer_python), machine()
    options.work.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    promises: list[dict[str, Any]] = []
    for load in options.work_loads:
        for threads in options.threads:
            for kl in options.kl:
                sides, made = measure(load, options.work, peer, KL[kl], threads, options.steps)
                lines += tables(load, threads, kl, sides, made, promises)
    text = "\n".join([
        "# A GRPO step beside TRL 1.16", "", described, "", *(__doc__ or "").split("\n\n")[2:],
        *(f"{name}: {WHAT[name]}." for name in options.work_loads), "",
        f"Best / median of {options.steps} steps a side, interleaved step by step in one run. OMP_NUM_THREADS and GOMP_SPINCOUNT are the same on all sides.",
        "", *lines,
    ])  # fmt: skip
    print(text)
    print(f"wrote {write_report('grpo-step', text, options.out)}")
    write_ratios("grpo_step", promises, options.work)


if __name__ == "__main__":
    main()
