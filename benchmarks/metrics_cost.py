"""What ``/metrics`` costs a run: seconds of a step with section ``metrics``, scraped each second (fifteen times as often as usual), and without it.

    python benchmarks/metrics_cost.py [--rounds 6]

Both sides are the real command and take turns. Two jobs: reinforcement learning in a pod (recipes/sort.yaml, smaller steps), whose controller answers; and
fine-tuning in one process (recipes/sft_sort.yaml), where the thread that answers has the interpreter of the training itself. Seconds are medians of
``timing_s/step`` in ``metrics.jsonl``; the first steps of a run are not counted, and no step has an evaluation or a checkpoint.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from machine import ROOT, machine, write_report
from options import parser as shared_parser

UNCOUNTED = 3
SCRAPE_S = 1.0


@dataclass
class Job:
    """A job and its counted steps: ``rounds`` has a pair of lists of seconds, without and with ``/metrics``, for each turn."""

    recipe: str
    settings: list[str]
    rounds: list[tuple[list[float], list[float]]] = field(default_factory=list)
    scrapes: int = 0
    scrape_bytes: int = 0


JOBS = {
    "reinforcement learning in a pod": Job(
        "sort.yaml",
        ["--run.max_steps=25", "--rollout.prompts_per_step=8", "--evaluation.every_steps=1000", "--evaluation.prompts=8", "--evaluation.final_prompts=8",
         "--evaluation.target_accuracy=1.0", "--checkpoint.every_steps=1000"],
    ),
    "fine-tuning in one process": Job("sft_sort.yaml", ["--run.max_steps=60", "--evaluation.every_steps=1000", "--checkpoint.every_steps=1000"]),
}  # fmt: skip


def run(job: Job, arguments: list[str], folder: Path, name: str, is_on: bool) -> list[float]:
    """Runs the command and returns the seconds of its counted steps. With ``is_on`` its metrics are scraped."""
    on = ["--metrics.targets_folder="] if is_on else []
    command = [sys.executable, "-m", "tandem.cli.main", "train", str(ROOT / "recipes" / job.recipe), f"--run.directory={folder}", f"--run.name={name}"]
    with subprocess.Popen([*command, *arguments, *on], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        ended, lines, thread = threading.Event(), [], None
        for line in process.stdout:
            lines.append(line)
            found = re.search(r"metrics at (http://\S+)", line)
            if found:
                thread = threading.Thread(target=scrape, args=(job, found[1], ended))
                thread.start()
        status = process.wait()
        ended.set()
        if thread is not None:
            thread.join()
    if status or is_on == (thread is None):
        sys.exit("".join(lines[-5:]))
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row["timing_s/step"] for row in rows[UNCOUNTED:]]


def scrape(job: Job, url: str, ended: threading.Event) -> None:
    while not ended.wait(SCRAPE_S):
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                job.scrape_bytes = len(answer.read())
                job.scrapes += 1
        except OSError:
            return


def report(rounds: int) -> str:
    lines = [
        "# What /metrics costs a run", "", machine(), "",
        f"`python benchmarks/metrics_cost.py --rounds {rounds}`: a scrape each {SCRAPE_S:g} s; Prometheus asks each 15 s.", "",
        "| job | steps a side | median step without | with | ratio | ratio of each turn | scrapes | bytes of one |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, job in JOBS.items():
        off = [seconds for without, _ in job.rounds for seconds in without]
        on = [seconds for _, those_with in job.rounds for seconds in those_with]
        ratios = [statistics.median(those_with) / statistics.median(without) for without, those_with in job.rounds]
        turns = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        medians = statistics.median(off), statistics.median(on)
        lines.append(
            f"| {name} | {len(off)} | {1000 * medians[0]:.1f} ms | {1000 * medians[1]:.1f} ms | {medians[1] / medians[0]:.3f} | {turns} | {job.scrapes} | "
            f"{job.scrape_bytes} |"
        )
    lines += ["", "The turns of the same side differ among each other by as much: compare the ratios of the turns, whose sides follow each other at once."]
    return "\n".join(lines)


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each side")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        first = Job("sft_sort.yaml", [])
        run(first, ["--run.max_steps=20", "--trainer.warmup_steps=2"], work, "start", False)
        for name, job in JOBS.items():
            settings = job.settings
            if job.recipe == "sort.yaml":
                settings = [*settings, "--model.create=null", f"--model.path={work / 'start' / 'model'}", "--sft=null"]
            for number in range(options.rounds):
                sides = {}
                for is_on in ((False, True) if number % 2 == 0 else (True, False)):
                    sides[is_on] = run(job, settings, work, f"{job.recipe.partition('.')[0]}-{number}-{'on' if is_on else 'off'}", is_on)
                job.rounds.append((sides[False], sides[True]))
                print(f"{name}, turn {number + 1}: {statistics.median(sides[False]):.4f} s, {statistics.median(sides[True]):.4f} s", flush=True)
    print(write_report("metrics-cost", report(options.rounds), options.out))


if __name__ == "__main__":
    main()
