"""Memory and CPU-seconds that the planner's model predicts for this machine beside those of real runs: a pod, and ranks of each mesh.

    python benchmarks/this_machine.py [--only NAME ...] [--steps 5]

A run's CPU-seconds are user and system time of all its processes from one row of its metrics to the next, the median of five steps; the machine may be shared,
which the time on the clock would show. They are predicted from the CPU-seconds of the model's own products, which ``tandem.kernels.measure`` takes with as
many threads as a rank has. Memory is the kernel's peak (``VmHWM``) of the fullest rank, less the resident size of a rank that holds nothing yet
(``tandem.estimate.processes``), which a rank has whatever it trains.

Every constant of the model that was measured on this machine was measured with the first size. The second is held out: another width, depth, ratio of heads and
length of sequences, with which nothing was chosen. ``start s`` is how long a run measures its products before its first step.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import ROOT, machine, write_report
from options import parser as shared_parser
from peers.clock import cpu_of, family
from predicted_time import MODEL, TASK, prepare
from zero_memory import rank_pids

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import AnyRecipe, Recipe, load_config
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.jobs.checks.check_rl import check_rl_run
from tandem.jobs.checks.predicted_time import data_cpu_seconds, rl_cpu_seconds
from tandem.model.create_model import create_model
from tandem.planner.model_input import recipe_shapes
from tandem.planner.recipe_layout import recipe_layout
from tandem.report.run_facts import PREDICTION_KEY
from tandem.runtime.process.processes import peak_memory_of
from tandem.runtime.records.journal import Journal

STEPS, RANKS = 5, 2


@dataclass(frozen=True, slots=True)
class Size:
    """A model, the tokens of its sequences and of a micro-batch, of which one pipeline stage takes a sequence at a time."""

    shapes: Mapping[str, int]
    sequence: int
    micro_batch: int


SIZES = {
    "13M": Size({"hidden": 384, "layers": 8, "heads": 6, "kv": 2, "inner": 1024}, 256, 512),
    "21M, held out": Size({"hidden": 512, "layers": 6, "heads": 8, "kv": 4, "inner": 1536}, 512, 1024),
}
"""Steps are short and states many times what a process varies by."""
MESHES = {
    "TP 2": ("parallel.tensor=2",), "PP 2": ("parallel.pipeline=2", "trainer.micro_batch_tokens={sequence}"),
    **{f"ZeRO {stage}": ("parallel.data=2", f"parallel.zero={stage}") for stage in range(4)},
}  # fmt: skip
MEMORY_BOUND, CPU_BOUND = 0.10, 0.25
MIB = 1 << 20
ALONE = b"the command itself"
"""The only rank of a run on data is the process of its command."""


@dataclass(frozen=True, slots=True)
class Compared:
    """MiB above the process and CPU-seconds of a step, predicted and measured. ``start_s``: seconds at the start of the run in which its ranks measured their
    products."""

    name: str
    predicted_mib: float
    measured_mib: float
    predicted_s: float
    measured_s: float
    start_s: float

    @property
    def memory_error(self) -> float:
        return self.predicted_mib / self.measured_mib - 1

    @property
    def cpu_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def row(self) -> str:
        met = f"{'met' if abs(self.memory_error) <= MEMORY_BOUND else 'MISSED'}, {'met' if abs(self.cpu_error) <= CPU_BOUND else 'MISSED'}"
        return (
            f"| {self.name} | {self.predicted_mib:,.0f} | {self.measured_mib:,.0f} | {100 * self.memory_error:+.0f} % | {self.predicted_s:.2f} | "
            f"{self.measured_s:.2f} | {100 * self.cpu_error:+.0f} % | {met} | {self.start_s:.2f} |"
        )


HEAD = (
    "| run | predicted MiB | measured MiB | error | predicted CPU s | measured CPU s | error | 10 %, 25 % | start s |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
)


def write_recipes(work: Path) -> dict[str, tuple[Path, Sequence[str]]]:
    """Returns the file and the overrides of each run. ``work`` has what ``prepare`` writes."""
    return {f"{name}, {size}": run for number, (size, chosen) in enumerate(SIZES.items()) for name, run in recipes_of(chosen, work, str(number)).items()}


def recipes_of(size: Size, work: Path, prefix: str) -> dict[str, tuple[Path, Sequence[str]]]:
    """Returns the runs of one size by name, whose files begin with ``prefix``."""
    text = f"algorithm: {{name: pretrain}}\ndata: {{train: [{{path: {work / 'text'}}}], sequence_length: {size.sequence}, global_batch_size: 4}}\n"
    text += f"trainer: {{micro_batch_tokens: {size.micro_batch}}}\n"
    own = "tokenizer: {tokenizer}, max_position_embeddings: {sequence}, head_dim"
    model = MODEL.replace("head_dim", own).format(**size.shapes, tokenizer=work / "tokenizer", sequence=size.sequence)
    pretrain, pod = work / f"{prefix}-pretrain.yaml", work / f"{prefix}-pod.yaml"
    folder = make_model(work, model, work / f"{prefix}-model", size.sequence)
    run = f"run: {{max_steps: {STEPS + 2}, name: run}}\ncheckpoint: {{every_steps: {STEPS + 1}}}\n"
    pretrain.write_text(f"model: {{path: {folder}}}\n{text}{run}", encoding="utf-8")
    pod.write_text(f"{MODEL.format(**size.shapes)}\n{TASK.replace('{rewards}', str(work / 'rewards.py'))}{run}", encoding="utf-8")
    # With a thread for each rank no thread waits for one that another program keeps from running.
    threads = f"machine.threads={RANKS}"
    meshes = {name: (pretrain, (*(each.format(sequence=size.sequence) for each in mesh), threads)) for name, mesh in MESHES.items()}
    return {**meshes, "main job (GRPO in a pod)": (pod, ("machine.threads=1",))}


def make_model(work: Path, text: str, folder: Path, sequence: int) -> Path:
    """Writes the model of ``text`` to ``folder``, which the first rank would otherwise make, whole, in its own memory."""
    recipe = folder.with_suffix(".yaml")
    data = f"data: {{train: [{{path: {work / 'text'}}}], sequence_length: {sequence}}}"
    recipe.write_text(f"{text}\nalgorithm: {{name: pretrain}}\n{data}\n", encoding="utf-8")
    create = load_config(recipe).model.create
    assert create is not None
    create_model(create, 0, folder)
    return folder


def measured(path: Path, overrides: Sequence[str], folder: Path, target: bytes) -> tuple[int, float]:
    """Runs a recipe, whose ranks have ``target`` in their command lines. Returns the peak bytes of its fullest rank of the trainer, and the median CPU-seconds
    of its steps but the first."""
    command = [sys.executable, "-m", "tandem.cli.main", "train", str(path), f"--run.directory={folder}", *(f"--{each}" for each in overrides)]
    with (folder / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        rows, used, peaks = 0, list[float](), dict[int, int]()
        metrics = folder / "run" / "metrics.jsonl"
        while process.poll() is None:
            for pid in [process.pid] if target == ALONE else rank_pids(process.pid, target):
                try:
                    peaks[pid] = max(peaks.get(pid, 0), peak_memory_of(pid))
                except ProcessLookupError:
                    continue
            now = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if now > rows:
                rows = now
                used.append(cpu_of(family(process.pid)))
            time.sleep(0.02)
    steps = [after - before for before, after in itertools.pairwise(used)]
    if process.returncode or len(steps) < STEPS:
        raise RuntimeError(f"exit status {process.returncode}, {len(steps)} steps seen\n{(folder / 'log').read_text(encoding='utf-8')[-4000:]}")
    return max(peaks.values()), statistics.median(steps[-STEPS:])


def predicted(recipe: AnyRecipe, mean_length: float) -> tuple[int, int, float]:
    """Returns the bytes of the fullest rank beside its process, those of the process, and the CPU-seconds of a step whose completions have ``mean_length``
    tokens."""
    memory = predict_rank_memory(recipe_shapes(recipe.model), recipe_layout(recipe, recipe_shapes(recipe.model), on_cpu=True))
    if isinstance(recipe, PretrainRecipe):
        return memory.allocated, memory.context, data_cpu_seconds(recipe)
    assert isinstance(recipe, Recipe)
    return memory.allocated, memory.context, rl_cpu_seconds(recipe, check_rl_run(recipe).prompts, mean_length)


def start_seconds(folder: Path) -> float:
    with Journal(folder / "run" / "journal.sqlite", read_only=True) as journal:
        return float(journal.get(PREDICTION_KEY)["took_s"])


def mean_length(folder: Path) -> float:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return statistics.mean(row.get("response_length/mean", 0.0) for row in rows)


def compare(names: Sequence[str] = ()) -> list[Compared]:
    """Returns the runs whose names begin with one of ``names`` (none: all), predicted and measured."""
    compared = []
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        prepare(work)
        runs: Mapping[str, tuple[Path, Sequence[str]]] = write_recipes(work)
        for number, (name, (path, overrides)) in enumerate(runs.items()):
            if names and not any(name.startswith(each) for each in names):
                continue
            folder = work / str(number)
            folder.mkdir()
            recipe = load_config(path, [f"--{each}" for each in overrides])
            target = b"trainer_worker" if isinstance(recipe, Recipe) else ALONE if recipe.parallel.world == 1 else b"data_rank"
            peak, seconds = measured(path, overrides, folder, target)
            allocated, process, predicted_s = predicted(recipe, mean_length(folder))
            compared.append(Compared(name, allocated / MIB, (peak - process) / MIB, predicted_s, seconds, start_seconds(folder)))
            print(compared[-1].row(), flush=True)
    return compared


def main() -> None:
    options = shared_parser(__doc__ or "")
    options.add_argument("--only", nargs="+", default=())
    given = options.parse_args()
    described, lines = machine(), [each.row() for each in compare(given.only)]
    text = "\n".join(["# Predicted memory and CPU-seconds of this machine", "", described, "", *(__doc__ or "").split("\n\n")[2:], "", *HEAD, *lines, ""])
    print(f"wrote {write_report('this-machine', text, given.out)}")


if __name__ == "__main__":
    main()
