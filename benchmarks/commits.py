"""Our code in this folder beside our code at another commit, in one run: what a change has cost or gained.

    python benchmarks/commits.py --before 0c1172b [--only step engine training] [--threads 1 2] [--rounds 6]

step      a GRPO step of recipes/sort.yaml: prompts, rollout, scores, reference pass, update, weights into the engine
engine    one call with the same random prompts at temperature 1, on models of 3.7M and 84M parameters
training  a pretraining step of a 30M-parameter model, packed and of varied length

The other commit is written to a temporary folder, and each side is driven by the scripts in its own ``benchmarks/peers``, with its own recipe,
in a process of its own with the same Python and the same number of threads. The start models, the prompts and the data are the same. The sides
take turns, call by call; what either compiles on first use it compiles before it says that it is ready, and the first call of each is not counted.
Ratios are seconds before over seconds now: above 1, this folder is the faster one. One thread is judged by CPU seconds, several by wall seconds.
"""

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_models import folder_of
from machine import ROOT, Driven, SideFailed, best_and_median, machine, write_ratios, write_report
from options import parser as shared_parser
from start_model import warm_model
from training import model_folder, write_batches

GATE = 0.98
ROWS = ("step", "engine", "training")
ENGINE = {"3.7M": (64, 32, 128), "84M": (32, 32, 64)}
"""By model (sequences, prompt tokens, new tokens) of a call."""
CALLS = {"step": 8, "3.7M": 2, "84M": 1, "packed": 1, "varied": 1}
"""Calls of each side in a round: short ones are repeated."""
WRITE_RUN = """
import sys
from pathlib import Path
from start_model import recipe_with, write_prompts, write_run
folder, model, steps, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
recipe = recipe_with([f"machine.threads={threads}"])
write_run(recipe, folder)
write_prompts(recipe, model, steps, folder / "prompts.jsonl")
"""
"""Run with the files of a commit: key names of recipes are that commit's."""


@dataclass(frozen=True)
class Side:
    """One commit: its name in the report and the folder of its files."""

    name: str
    tree: Path

    def environment(self) -> dict[str, str]:
        """Variables with which Python, and every process that it starts, imports this commit's files and none of the current folder."""
        scripts = self.tree / "benchmarks"
        return {"PYTHONPATH": os.pathsep.join(map(str, (self.tree, scripts / "peers", scripts))), "PYTHONSAFEPATH": "1"}

    def write_run(self, folder: Path, model: Path, steps: int, threads: int) -> None:
        """Writes the recipe and the prompts of ``steps`` steps to ``folder``. Raises ``SideFailed``."""
        command = [sys.executable, "-c", WRITE_RUN, str(folder), str(model), str(steps), str(threads)]
        done = subprocess.run(command, env={**os.environ, **self.environment()}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SideFailed(f"commit {self.name} cannot write its run of recipes/sort.yaml: {done.stderr.strip().splitlines()[-1]}")

    def driven(self, script: str, arguments: Sequence[str | Path], threads: int, work: Path) -> Driven:
        """Starts ``benchmarks/peers/SCRIPT`` of this commit. Raises ``SideFailed`` where the commit has no such script."""
        path = self.tree / "benchmarks" / "peers" / script
        if not path.is_file():
            raise SideFailed(f"commit {self.name} has no benchmarks/peers/{script}")
        log = work / f"commits-{self.name}-{path.stem}.log"
        return Driven(self.name, [sys.executable, path, *arguments], threads, log, self.environment())


@dataclass(frozen=True)
class Row:
    """The calls of one measured thing on both sides: wall and CPU seconds of each, and how equal their results were."""

    what: str
    threads: int
    before: list[dict[str, Any]]
    now: list[dict[str, Any]]
    equality: str
    tokens: int = 0

    def ratio(self, clock: str) -> tuple[float, float]:
        """(best, median) seconds before over seconds now."""
        a, b = (best_and_median([call[clock] for call in calls]) for calls in (self.before, self.now))
        return a[0] / b[0], a[1] / b[1]

    def clock(self) -> str:
        return "cpu_s" if self.threads == 1 else "wall_s"

    def line(self) -> str:
        """The row of the table."""
        cells = [self.what, str(self.threads)]
        for clock in ("cpu_s", "wall_s"):
            for calls in (self.before, self.now):
                best, median = best_and_median([call[clock] for call in calls])
                cells.append(f"{best:.3f} / {median:.3f}")
            best, median = self.ratio(clock)
            cells.append(f"**{best:.3f}** / {median:.3f}" if clock == self.clock() else f"{best:.3f} / {median:.3f}")
        rates = [f"{self.tokens / min(call['wall_s'] for call in calls):,.0f}" for calls in (self.before, self.now)]
        cells += [" / ".join(rates) if self.tokens else "", self.equality]
        return "| " + " | ".join(cells) + " |"


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, stdout=subprocess.PIPE).stdout


def commit_named(name: str) -> str:
    """The short hash of the commit. Exits where there is none of that name."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", "--short", f"{name}^{{commit}}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"--before: the repository has no commit '{name}'; `git log --oneline` lists them")
    return done.stdout.strip()


def write_tree(commit: str, folder: Path) -> Path:
    """Writes the files of ``commit`` to ``folder``."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit))) as archive:
        archive.extractall(folder, filter="data")
    return folder


def take_turns(sides: Sequence[Driven], asked: Sequence[str], label: str) -> list[list[dict[str, Any]]]:
    """The answers of each side to ``asked``, but for the first, which is not counted."""
    answers: list[list[dict[str, Any]]] = [[] for _ in sides]
    for number, command in enumerate(asked):
        for side, found in zip(sides, answers, strict=True):
            took = side.ask(command)
            print(f"{label}, call {number}, {side.name}: CPU {took['cpu_s']:.3f} s, wall {took['wall_s']:.3f} s", file=sys.stderr, flush=True)
            if number:
                found.append(took)
    return answers


def measure_step(sides: tuple[Side, Side], work: Path, threads: int, rounds: int) -> Iterator[Row]:
    model, steps = warm_model(work), rounds * CALLS["step"]
    with tempfile.TemporaryDirectory(dir=work) as name:
        commands = []
        for side in sides:
            run = Path(name).resolve() / side.name
            side.write_run(run, model, steps + 1, threads)
            commands.append([model, run / "prompts.jsonl", run])
        with (
            sides[0].driven("tandem_grpo.py", commands[0], threads, work) as one,
            sides[1].driven("tandem_grpo.py", commands[1], threads, work) as two,
        ):
            before, now = take_turns((one, two), ["step"] * (steps + 1), f"GRPO step, threads {threads}")
    same = sum((a["reward"], a["mean_length"]) == (b["reward"], b["mean_length"]) for a, b in zip(before, now, strict=True))
    lengths = [sum(step["mean_length"] for step in steps_of) / len(steps_of) for steps_of in (before, now)]
    equality = f"{same} of {len(now)} steps drew equal samples; {lengths[0]:.2f} / {lengths[1]:.2f} tokens a completion"
    yield Row("GRPO step", threads, before, now, equality)


def measure_engine(sides: tuple[Side, Side], work: Path, threads: int, rounds: int) -> Iterator[Row]:
    for model, (sequences, prompt, new) in ENGINE.items():
        folder = folder_of(model, work)
        told: list[str | Path] = [folder, str(threads)]
        with sides[0].driven("tandem_engine.py", told, threads, work) as one, sides[1].driven("tandem_engine.py", told, threads, work) as two:
            greedy = [side.ask(f"generate 0 8 {prompt} 16 0")["token_ids"] for side in (one, two)]
            calls = [f"generate {call} {sequences} {prompt} {new} 1.0" for call in range(1, rounds * CALLS[model] + 2)]
            before, now = take_turns((one, two), calls, f"engine {model}, threads {threads}")
        equal = sum(a == b for a, b in zip(*greedy, strict=True))
        yield Row(f"engine {model}", threads, before, now, f"{equal} of {len(greedy[0])} greedy completions equal", sequences * new)


def measure_training(sides: tuple[Side, Side], work: Path, threads: int, rounds: int) -> Iterator[Row]:
    model, batches = model_folder(work), work / "commits-batches.json"
    write_batches(batches, rounds + 1)
    told: list[str | Path] = [model, batches, str(threads)]
    with sides[0].driven("tandem_training.py", told, threads, work) as one, sides[1].driven("tandem_training.py", told, threads, work) as two:
        for kind in ("packed", "varied"):
            before, now = take_turns((one, two), [kind] * (rounds * CALLS[kind] + 1), f"pretraining step, {kind}, threads {threads}")
            apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(before, now, strict=True))
            yield Row(f"pretraining step, {kind}", threads, before, now, f"losses at most {apart:.1e} apart")


MEASURES = {"step": measure_step, "engine": measure_engine, "training": measure_training}


def options_of() -> argparse.Namespace:
    made = shared_parser(__doc__ or "", threads=(1, 2), work="models, data and logs are")
    made.add_argument("--before", default="HEAD~1", metavar="COMMIT", help="the commit that this folder is compared with (default: HEAD~1)")
    made.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="the rows to measure")
    made.add_argument("--rounds", type=int, default=6, help="counted rounds of each row")
    return made.parse_args()


def report(described: str, sides: tuple[Side, Side], rounds: int, rows: Sequence[Row], failed: Sequence[str]) -> str:
    judged = [(row, row.ratio(row.clock())) for row in rows]
    lowest = min(judged, key=lambda pair: pair[1][0], default=None)
    verdict = ""
    if lowest is not None:
        row, ratio = lowest
        named = f"{row.what}, {row.threads} thread{'s' if row.threads > 1 else ''}"
        met = "met" if ratio[0] >= GATE else "MISSED"
        verdict = f"Lowest: {named}, {ratio[0]:.3f} (median {ratio[1]:.3f}). The gate, none below {GATE}, is {met}."
    return "\n".join([
        f"# {sides[1].name} beside {sides[0].name}", "", described, "",
        f"Before: {sides[0].name}. Now: {sides[1].name}. Best / median seconds of {rounds} rounds, taken in turn, call by call, in one run. Ratio: seconds "
        "before over seconds now. CPU seconds count all threads and child processes. The ratio in bold is the one that is judged.", "",
        "| what | threads | CPU s before | CPU s now | before / now | wall s before | wall s now | before / now | tokens/s before / now | equality |",
        "|---|---|---|---|---|---|---|---|---|---|", *(row.line() for row in rows), "", *failed, verdict, "",
    ])  # fmt: skip


def main() -> int:
    options = options_of()
    commit, described = commit_named(options.before), machine()
    options.work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tandem-before-") as folder:
        sides = (Side(commit, write_tree(commit, Path(folder))), Side(f"now-{git('describe', '--always', '--dirty').decode().strip()}", ROOT))
        for name in options.only:
            for threads in options.threads:
                print(f"--- {name}, threads {threads}", file=sys.stderr, flush=True)
                try:
                    for row in MEASURES[name](sides, options.work, threads, options.rounds):
                        rows.append(row)
                        print(row.line(), file=sys.stderr, flush=True)
                except SideFailed as error:
                    print(error, file=sys.stderr, flush=True)
                    failed.append(f"FAILED: {name}, --threads {threads}: {str(error).splitlines()[0]}")
    text = report(described, sides, options.rounds, rows, failed)
    print(text)
    print(f"wrote {write_report('commits', text, options.out)}")
    promises = []
    for row in rows:
        best, median = row.ratio(row.clock())
        seconds, plural = ("CPU", "") if row.threads == 1 else ("wall", "s")
        promises.append(
            {"what": f"{row.what}, now against {commit}, {seconds} seconds, {row.threads} thread{plural}", "ratio": best, "median": median, "target": GATE}
        )
    write_ratios("commits", promises, options.work)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
