"""How soon the dashboard opens a long run, and what it costs a run that it follows.

Runs of 10,000 and of 100,000 steps are written with the real writers: rows of 60 metrics, twelve phases a step, and samples of 200 steps. A fresh `tandem
dashboard` is asked for what the page asks first: the overview, and twelve curves of 800 points. The first time the files are read; the second time they have
been. Milliseconds of the clock and, as other work on the machine does not count in them, CPU milliseconds of the dashboard. Then a real Chromium opens the run,
from the address to the first drawn charts. Last, a run of 10,000 steps writes a row and twelve phases every second while Chromium shows its curves: CPU
seconds of the dashboard, and what a step's records take with the page and without it.

    python benchmarks/dashboard.py [--seconds 30] [--out benchmarks/results]
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from machine import ROOT, machine, write_report
from options import parser as shared_parser

for room in (".", "dashboard"):
    sys.path.insert(0, str(ROOT / "tests" / room))

from browser import browser, tab  # noqa: E402 - found by the lines above
from http_processes import LoggedProcess, serving_command  # noqa: E402
from recorded_runs import KEYS, row, samples_of  # noqa: E402

from tandem.config.recipe import load_config  # noqa: E402
from tandem.jobs.run_files import write_recipe  # noqa: E402
from tandem.runtime.records.journal import Journal  # noqa: E402
from tandem.runtime.records.metrics import MetricsFile  # noqa: E402

PHASES = ("offload", "convert", "register", "update_weight", "wait_rollout", "rollout", "keep_engine", "onload", "inference", "train", "checkpoint", "evaluate")
SAMPLED_STEPS = 200
POINTS = 800
METRICS = 60
_MS = 1e3


def wide_row(step: int) -> dict[str, Any]:
    """Returns a row of as many metrics as a run of the sort recipe has."""
    return row(step, **{f"more/metric_{number}": 0.123456789 * number + step for number in range(METRICS - len(KEYS) - 5)})


def make_run(folder: Path, steps: int) -> Path:
    folder.mkdir(parents=True)
    write_recipe(load_config(ROOT / "recipes" / "sort.yaml", []), folder)
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step in range(steps):
        metrics.append(wide_row(step))
    metrics.close()
    with Journal(folder / "journal.sqlite") as journal:
        journal.set("memory", {"trainer": 4e6})
        for step in range(0, steps, steps // SAMPLED_STEPS):
            samples, scores = samples_of(step, prompts=32)
            journal.commit_samples(step, samples)
            journal.commit_scores(step, scores)
            journal.commit_evaluation(step, "sampled", {"accuracy": 0.5, "standard_error": 0.01, "count": 64, "examples": []})
        # As a run would in days: one transaction, and no chain of digests, which reading does not follow.
        connection = journal._connection
        connection.execute("BEGIN")
        for step in range(steps):
            rows = ((step, "rollout" if phase in ("rollout", "evaluate") else "trainer", phase, 1e9 + step + place / 14, 1e9 + step + (place + 0.9) / 14)
                    for place, phase in enumerate(PHASES))  # fmt: skip
            connection.executemany("INSERT INTO transitions (step, sidecar, state, started_s, ended_s, incarnation) VALUES (?, ?, ?, ?, ?, 1)", rows)
        connection.execute("COMMIT")
    return folder


def cpu_seconds(process: Any) -> float:
    return float(sum(psutil.Process(process.pid).cpu_times()[:2]))


def timed(served: LoggedProcess, path: str) -> tuple[float, float, float]:
    """Returns milliseconds, CPU milliseconds of the server, and kilobytes of an answer."""
    began, spent = time.perf_counter(), cpu_seconds(served.process)
    answer = served.get(path)
    seconds = time.perf_counter() - began
    assert answer.status_code == 200, answer.text
    return seconds * _MS, (cpu_seconds(served.process) - spent) * _MS, len(answer.content) / 1e3


def opening(folder: Path, log: Path, name: str, steps: int, chromium: Any) -> list[str]:
    keys = (*KEYS, "mismatch_kl", "timing_s/step", "memory/train/measured")
    curves = f"/api/curves?run={name}&points={POINTS}&" + "&".join(f"key={key}" for key in keys)
    asked = {"overview": f"/api/run?run={name}", "12 curves": curves, "phases of the newest steps": f"/api/phases?run={name}",
             "all phases": f"/api/phases?run={name}&from=0&to={steps}", "samples of the newest step": f"/api/samples?run={name}"}  # fmt: skip
    lines, first, again = [], {}, {}
    with serving_command(["dashboard", str(folder), "--port", "0"], log, "dashboard at ") as (process, url, client):
        served = LoggedProcess(process, url.rstrip("/"), client, log)
        served.get("/")
        for what, path in asked.items():
            first[what] = timed(served, path)
            again[what] = min(timed(served, path) for _ in range(3))
        resident = psutil.Process(process.pid).memory_info().rss / 1e6
    lines += [f"| {name} | {what} | {first[what][0]:,.0f} | {first[what][1]:,.0f} | {again[what][0]:,.0f} | {first[what][2]:,.0f} |" for what in asked]
    with serving_command(["dashboard", str(folder), "--port", "0"], log, "dashboard at ") as (_, url, _), tab(chromium) as page:
        began = time.perf_counter()
        page.page.goto(f"{url}#/run/{name}/curves", wait_until="commit")
        page.page.wait_for_selector(".chart canvas")
        lines.append(f"| {name} | Chromium, from the address to drawn charts | {(time.perf_counter() - began) * _MS:,.0f} | - | - | - |")
    return [*lines, f"| {name} | resident size of the dashboard, MB | {resident:,.0f} | - | - | - |"]


def write_steps(folder: Path, first: int, seconds: float) -> list[float]:
    """Writes a step every second; returns the milliseconds of each step's records."""
    metrics, took, step, ends = MetricsFile(folder / "metrics.jsonl"), [], first, time.perf_counter() + seconds
    with Journal(folder / "journal.sqlite") as journal:
        while time.perf_counter() < ends:
            began = time.perf_counter()
            for phase in PHASES:
                with journal.transition(step, "trainer", phase):
                    pass
            metrics.append(wide_row(step))
            took.append((time.perf_counter() - began) * _MS)
            step += 1
            time.sleep(max(0.0, 1.0 - (time.perf_counter() - began)))
    metrics.close()
    return took


def following(folder: Path, log: Path, name: str, steps: int, seconds: float, chromium: Any) -> list[str]:
    alone = write_steps(folder / name, steps, seconds)
    with serving_command(["dashboard", str(folder), "--port", "0"], log, "dashboard at ") as (process, url, _), tab(chromium) as page:
        page.page.goto(f"{url}#/run/{name}/curves")
        page.page.wait_for_selector(".chart canvas")
        before = cpu_seconds(process)
        watched = write_steps(folder / name, steps + len(alone), seconds)
        spent = cpu_seconds(process) - before
        page.page.wait_for_function(f"() => document.querySelector('#summary').textContent.startsWith('{steps + len(alone) + len(watched):,}')")
    return [
        f"A run that writes a step every second, with the page open for {seconds:.0f} s: the dashboard uses {100 * spent / seconds:.1f} % of a core. The "
        f"records of a step take {statistics.median(alone):.1f} ms (median) without it and {statistics.median(watched):.1f} ms with it.",
    ]  # fmt: skip


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    lines = ["# The dashboard", "", machine(), "", (__doc__ or "").split("\n\n")[1], ""]
    lines += ["| run | answer | first, ms | CPU, ms | again, ms | KB |", "| --- | --- | --: | --: | --: | --: |"]
    with tempfile.TemporaryDirectory() as work, browser() as chromium:
        folder, log = Path(work) / "runs", Path(work) / "log"
        for name, steps in (("steps-10000", 10_000), ("steps-100000", 100_000)):
            made = make_run(folder / name, steps)
            print(f"{name}: {(made / 'metrics.jsonl').stat().st_size / 1e6:.0f} MB of metrics", flush=True)
            lines += opening(folder, log, name, steps, chromium)
            print(*lines[-7:], sep="\n", flush=True)
        lines += ["", *following(folder, log, "steps-10000", 10_000, options.seconds, chromium)]
    print(json.dumps(lines[-1]))
    print(f"wrote {write_report('dashboard', chr(10).join(lines), options.out)}")


if __name__ == "__main__":
    main()
