"""How soon the dashboard opens a long run, and what it costs a run that it follows.

Runs of 10,000 and of 100,000 steps are written with the real writers: rows of 60 metrics, twelve phases a step, and samples of 200 steps. A fresh `tandem
dashboard` is asked for what the page asks first: the overview, and twelve curves of 800 points. The first time the files are read; the second time they have
been. Milliseconds of the clock and, as other work on the machine does not count in them, CPU milliseconds of the dashboard. Then a real Chromium opens the run
in fresh dashboards, as often as ``--openings`` says: from the beginning of the navigation to the frame after the first chart was drawn, as the page itself
measures it. Last, a run of 10,000 steps writes twelve phases and a row twice a second, in blocks during which Chromium shows its curves and blocks during which
it does not, in turns: wall and CPU milliseconds of a step's records, and CPU seconds of the dashboard.

    python benchmarks/dashboard.py [--seconds 120] [--openings 9] [--only-opening] [--out benchmarks/results]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from machine import ROOT, machine, write_report
from metrics_cost import interval
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
BLOCK_S = 10.0
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


DRAWN = """
    new MutationObserver((_, observer) => {
        if (!document.querySelector(".chart canvas")) return;
        observer.disconnect();
        requestAnimationFrame(() => setTimeout(() => { window.drawnMs = performance.now(); }, 0));
    }).observe(document, { childList: true, subtree: true });
"""
"""Notes the time of the frame after the first chart, since the beginning of the navigation."""


def chromium_opening(folder: Path, log: Path, name: str, chromium: Any) -> tuple[float, float]:
    """Returns the milliseconds until a fresh dashboard and a fresh browser profile show the curves of a run, and CPU milliseconds of the dashboard."""
    with serving_command(["dashboard", str(folder), "--port", "0"], log, "dashboard at ") as (process, url, _), tab(chromium) as page:
        page.page.add_init_script(DRAWN)
        before = cpu_seconds(process)
        page.page.goto(f"{url}#/run/{name}/curves", wait_until="commit")
        page.page.wait_for_function("() => window.drawnMs")
        return float(page.page.evaluate("() => window.drawnMs")), (cpu_seconds(process) - before) * _MS


def opening(folder: Path, log: Path, name: str, steps: int, openings: int, chromium: Any) -> list[str]:
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
    drawn, used = zip(*(chromium_opening(folder, log, name, chromium) for _ in range(openings)), strict=True)
    spread = f" ({min(drawn):,.0f} to {max(drawn):,.0f})" if openings > 1 else ""
    lines.append(f"| {name} | Chromium, from the navigation to drawn charts, median of {openings} | {statistics.median(drawn):,.0f}{spread} | "
                 f"{statistics.median(used):,.0f} | - | - |")  # fmt: skip
    return [*lines, f"| {name} | resident size of the dashboard, MB | {resident:,.0f} | - | - | - |"]


class Writer:
    """Writes a run's records, two steps a second. ``seconds``, ``cpu_s``: of each step's records, by whether the page was open."""

    def __init__(self, folder: Path, first: int) -> None:
        self._metrics, self._journal, self.step = MetricsFile(folder / "metrics.jsonl"), Journal(folder / "journal.sqlite"), first
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.cpu_s: dict[bool, list[float]] = {False: [], True: []}

    def block(self, is_open: bool, seconds: float) -> None:
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            began, used = time.perf_counter(), time.process_time()
            for phase in PHASES:
                with self._journal.transition(self.step, "trainer", phase):
                    pass
            self._metrics.append(wide_row(self.step))
            self.cpu_s[is_open].append(time.process_time() - used)
            self.seconds[is_open].append(time.perf_counter() - began)
            self.step += 1
            time.sleep(max(0.0, 0.5 - (time.perf_counter() - began)))

    def close(self) -> None:
        self._metrics.close()
        self._journal.close()


def following(folder: Path, log: Path, name: str, steps: int, seconds: float, chromium: Any) -> list[str]:
    writer, spent, blocks = Writer(folder / name, steps), 0.0, max(2, round(seconds / 2 / BLOCK_S))
    with serving_command(["dashboard", str(folder), "--port", "0"], log, "dashboard at ") as (process, url, _), tab(chromium) as page:
        for number in range(2 * blocks):
            # Pairs begin with each side in turns.
            is_open = number % 4 in (0, 3)
            if is_open:
                page.page.goto(f"{url}#/run/{name}/curves")
                page.page.wait_for_selector(".chart canvas")
            else:
                page.page.goto("about:blank")
            before = cpu_seconds(process)
            writer.block(is_open, BLOCK_S)
            spent += (cpu_seconds(process) - before) * is_open
        page.page.goto(f"{url}#/run/{name}/curves")
        page.page.wait_for_function(f"() => document.querySelector('#summary').textContent.startsWith('{writer.step:,}')")
    writer.close()
    lines = [f"A run that writes two steps a second, {blocks} blocks of {BLOCK_S:.0f} s with the page open and as many without, in turns: the dashboard uses "
             f"{100 * spent / (blocks * BLOCK_S):.1f} % of a core while the page is open.", "",
             "| records of a step | without, ms | with the page, ms | ratio (95 % interval) |", "| --- | --: | --: | --: |"]  # fmt: skip
    for what, found in (("wall", writer.seconds), ("CPU of the run's process", writer.cpu_s)):
        off, on = statistics.median(found[False]), statistics.median(found[True])
        low, high = interval(found[False], found[True])
        lines.append(f"| {what} | {off * _MS:.2f} | {on * _MS:.2f} | {on / off:.3f} ({low:.3f} to {high:.3f}) |")
    return lines


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the run is followed")
    parser.add_argument("--openings", type=int, default=9, help="openings of the run of 10,000 steps in Chromium")
    parser.add_argument("--only-opening", action="store_true", help="a run of 10,000 steps is opened, and nothing else")
    options = parser.parse_args()
    lines = ["# The dashboard", "", machine(), "", (__doc__ or "").split("\n\n")[1], ""]
    lines += ["| run | answer | first, ms | CPU, ms | again, ms | KB |", "| --- | --- | --: | --: | --: | --: |"]
    with tempfile.TemporaryDirectory() as work, browser() as chromium:
        folder, log = Path(work) / "runs", Path(work) / "log"
        for name, steps in (("steps-10000", 10_000), ("steps-100000", 100_000))[: 1 if options.only_opening else 2]:
            made = make_run(folder / name, steps)
            print(f"{name}: {(made / 'metrics.jsonl').stat().st_size / 1e6:.0f} MB of metrics", flush=True)
            lines += opening(folder, log, name, steps, options.openings if steps == 10_000 else 1, chromium)
            print(*lines[-7:], sep="\n", flush=True)
        if not options.only_opening:
            lines += ["", *following(folder, log, "steps-10000", 10_000, options.seconds, chromium)]
    print(*lines[-6:], sep="\n")
    print(f"wrote {write_report('dashboard', chr(10).join(lines), options.out)}")


if __name__ == "__main__":
    main()
