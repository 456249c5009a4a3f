"""What ``/metrics`` costs a run: seconds of a step while it is scraped four times a second (sixty times as often as usual), and of steps in between without.

    python benchmarks/metrics_cost.py [--steps 120]

One run of each of two jobs, in which blocks of ``BLOCK`` steps with and without a scraper take turns, so that both sides have the same minutes of the machine:
reinforcement learning in a pod (recipes/sort.yaml, smaller steps), whose controller answers; and fine-tuning in one process (recipes/sft_sort.yaml), where
the thread that answers shares the interpreter with the training. No step has an evaluation or a checkpoint. Then the processor time of an answer and of the
event that a row is, from which follows the cost at the usual 15 s.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from machine import ROOT, machine, write_report
from options import parser as shared_parser

from tandem.config.recipe import load_config
from tandem.jobs.exposed.run_metrics import RunMetrics
from tandem.jobs.start import train
from tandem.runtime.callback import Callback

BLOCK, UNCOUNTED = 6, 6
SCRAPE_S, USUAL_S = 0.25, 15.0
RESAMPLED = 2000
SCRAPER = """
import pathlib, sys, time, urllib.request
flag, url, count = pathlib.Path(sys.argv[1]), sys.argv[2], 0
while True:
    time.sleep(float(sys.argv[3]))
    if flag.exists():
        try:
            urllib.request.urlopen(url, timeout=5).read()
        except OSError:
            continue
        count += 1
        flag.with_suffix(".count").write_text(str(count))
"""
NO_PAUSE = ["evaluation.every_steps=100000", "evaluation.prompts=8", "evaluation.final_prompts=8", "evaluation.target_accuracy=1.0"]


class Turns(Callback):
    """Starts a scraper in a process of its own, which works while ``flag`` exists, and makes or removes ``flag`` at the end of each block of steps."""

    def __init__(self, flag: Path, scrape_s: float = SCRAPE_S) -> None:
        self.flag, self.scrape_s = flag, scrape_s
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.newest: dict[str, float | int | str] = {}
        self._scraper: subprocess.Popen[bytes] | None = None

    def message(self, text: str) -> None:
        if text.startswith("metrics at "):
            self._scraper = subprocess.Popen([sys.executable, "-c", SCRAPER, str(self.flag), text.removeprefix("metrics at "), str(self.scrape_s)])

    def row(self, row: Mapping[str, float | int | str]) -> None:
        step, self.newest = int(row["step"]), dict(row)
        if step >= UNCOUNTED:
            self.seconds[step // BLOCK % 2 == 1].append(float(row["timing_s/step"]))
        if (step + 1) // BLOCK % 2 == 1:
            self.flag.touch()
        else:
            self.flag.unlink(missing_ok=True)

    def end(self) -> int:
        """Ends the scraper; returns how often it has scraped."""
        assert self._scraper is not None, "the run said where its metrics are"
        self._scraper.kill()
        self._scraper.wait()
        count = self.flag.with_suffix(".count")
        return int(count.read_text()) if count.exists() else 0


def interval(off: list[float], on: list[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the ratio of the medians, by resampling."""
    draw = random.Random(0)
    ratios = sorted(statistics.median(draw.choices(on, k=len(on))) / statistics.median(draw.choices(off, k=len(off))) for _ in range(RESAMPLED))
    return ratios[RESAMPLED // 40], ratios[-RESAMPLED // 40]


def processor_ms(folder: Path, row: Mapping[str, float | int | str]) -> tuple[float, float, int]:
    """Returns the milliseconds of the processor that an answer and a row take, with the journal of the run in ``folder``, and the bytes of an answer."""
    metrics = RunMetrics("run", "job", True)
    metrics.started(str(folder), 100, None)
    times = []
    for act in (lambda: metrics.row(row), metrics.text):
        began = time.process_time()
        for _ in range(200):
            act()
        times.append(1000 * (time.process_time() - began) / 200)
    return times[1], times[0], len(metrics.text())


def measure(name: str, recipe: str, settings: list[str], work: Path) -> str:
    """Returns the row of the job's table."""
    turns = Turns(work / f"{recipe}.flag")
    config = load_config(ROOT / "recipes" / f"{recipe}.yaml", [*settings, f"run.directory={work}", f"run.name={recipe}", "metrics.targets_folder="])
    train(config, callbacks=[turns], progress=False)
    scrapes, off, on = turns.end(), turns.seconds[False], turns.seconds[True]
    low, high = interval(off, on)
    answer_ms, row_ms, size = processor_ms(work / recipe, turns.newest)
    ratio = statistics.median(on) / statistics.median(off)
    usual = answer_ms / 1000 / USUAL_S + row_ms / 1000 / statistics.median(off)
    print(json.dumps({"job": name, "off": off, "on": on}), flush=True)
    medians = f"{1000 * statistics.median(off):.1f} ms | {1000 * statistics.median(on):.1f} ms"
    return (
        f"| {name} | {len(off)} | {medians} | {ratio:.3f} ({low:.3f} to {high:.3f}) | {scrapes} | "
        f"{answer_ms:.2f} ms, {size} bytes | {row_ms:.3f} ms | {100 * usual:.3f} % |"
    )


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=120, help="steps of reinforcement learning; fine-tuning takes three times as many")
    options = parser.parse_args()
    lines = [
        "# What /metrics costs a run", "", machine(), "",
        f"`python benchmarks/metrics_cost.py --steps {options.steps}`: blocks of {BLOCK} steps with a scrape each {SCRAPE_S:g} s and without take turns in one "
        f"run. The last column is the processor time of rows and of answers each {USUAL_S:g} s, as Prometheus asks, as a share of one core.", "",
        "| job | steps a side | median step without | scraped | ratio (95 % interval) | scrapes | an answer | a row | usual share of a core |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tuning = ["checkpoint.every_steps=100000"]
        lines.append(measure("fine-tuning in one process", "sft_sort", [*tuning, f"run.max_steps={3 * options.steps}"], work))
        model = ["model.create=null", f"model.path={work / 'sft_sort' / 'model'}", "sft=null", "rollout.prompts_per_step=8"]
        lines.append(measure("reinforcement learning in a pod", "sort", [*NO_PAUSE, *tuning, *model, f"run.max_steps={options.steps}"], work))
    print(write_report("metrics-cost", "\n".join(lines), options.out))


if __name__ == "__main__":
    main()
