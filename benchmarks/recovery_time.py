"""Seconds from a fault to the next training step, by kind: a rank of a run on data, and a node of a run of reinforcement learning in two pods.

    python benchmarks/recovery_time.py [--repeat 20] [--kinds rank node]

A rank is killed with ``kill -9`` in a run on two data-parallel ranks; a node is all processes of one of two pods that both train, killed at once. The clock
ends with the first row that is written after it to ``metrics.jsonl``. ``found``: when the command says so. Beside it, in the same minutes, what the start of a
rank takes alone: Python with the imports of a rank.
"""

import csv
import json
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import ROOT, machine, write_report
from options import parser

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "pod")]
from pod_runs import PodRun  # noqa: E402

LIMITS_S = {"rank": 5.0, "node": 10.0}
IMPORTS = "import tandem.trainer.rank_process, tandem.jobs.data_run.data_rank"
_LIMIT_S = 180.0
_LONG = ("--run.max_steps=1000000", "--run.max_restarts=1000")


@dataclass(frozen=True)
class Fault:
    """Seconds from the fault until it was found, and until the next step had ended; what the last steps before took."""

    found_s: float
    step_s: float
    before_s: float


def tree_of(root: int) -> list[int]:
    """The process ``root`` and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(int(entry.name))
        except (OSError, ValueError):
            continue
    found, left = [], [root]
    while left:
        found.append(left.pop())
        left += parents.get(found[-1], [])
    return found


def rank_to_kill(run: PodRun, chosen: random.Random) -> list[int]:
    ranks = sorted(pid for pid, line in run.processes().items() if "rank_process" in line)
    return [chosen.choice(ranks)] if len(ranks) == 2 else []


def node_to_kill(run: PodRun, chosen: random.Random) -> list[int]:
    shims = [pid for pid, line in run.processes().items() if "tandem.pod.shim" in line and "--pod-number 1" in line]
    return [pid for shim in shims for pid in tree_of(shim)] if len(shims) == 2 else []


COMMANDS: dict[str, tuple[Sequence[str], Callable[[PodRun, random.Random], list[int]]]] = {
    "rank": (
        (str(ROOT / "tests" / "cluster" / "tiny.yaml"), "--parallel.data=2", "--checkpoint.every_steps=5", *_LONG),
        rank_to_kill,
    ),
    "node": (
        (str(ROOT / "tests" / "pod" / "tiny.yaml"), "--pods", "2", "--trainer-pods", "2", "--parallel.data=2", "--sft.steps=6", "--checkpoint.every_steps=2",
         "--evaluation.every_steps=1000000", *_LONG),
        node_to_kill,
    ),
}  # fmt: skip


class Watched:
    """A run whose output and metrics are followed."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.run = PodRun(folder)
        recipe, *rest = arguments
        self.process = self.run.begin("train", recipe, f"--run.directory={folder}", "--run.name=run", *rest)
        self.lines: queue.Queue[tuple[float, str]] = queue.Queue()
        self.text: list[str] = []
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()
        self.metrics = self.run.directory / "metrics.jsonl"

    def _read(self, stream: "object") -> None:
        for line in stream:  # type: ignore[attr-defined]
            self.text.append(line)
            self.lines.put((time.monotonic(), line))

    def size(self) -> int:
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def wait_for_rows(self, count: int) -> float:
        """Waits for ``count`` further rows. Returns the mean seconds of one."""
        began, ends, seen, size = time.monotonic(), time.monotonic() + _LIMIT_S, 0, self.size()
        while seen < count:
            self._check(ends)
            time.sleep(0.002)
            now = self.size()
            seen, size = seen + (now > size), now
        return (time.monotonic() - began) / count

    def fault(self, pids: Sequence[int], before_s: float) -> Fault:
        """Kills ``pids`` and waits for the next row."""
        while not self.lines.empty():
            self.lines.get()
        began = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        # A row that was on its way is none of the recovery's.
        time.sleep(0.05)
        size, found, ends = self.size(), None, began + _LIMIT_S
        while True:
            self._check(ends)
            while not self.lines.empty():
                at, line = self.lines.get()
                if found is None and ("restarting" in line or "replacing" in line):
                    found = at - began
            now = self.size()
            # Rows behind the checkpoint are removed first.
            if now > size and found is not None:
                return Fault(found, time.monotonic() - began, before_s)
            size = now
            time.sleep(0.002)

    def _check(self, ends: float) -> None:
        if self.process.poll() is not None or time.monotonic() > ends:
            sys.exit(f"the run ended, or does not go on:\n{''.join(self.text)[-3000:]}")

    def close(self) -> None:
        for pid in self.run.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def measure(kind: str, repeat: int, folder: Path) -> list[Fault]:
    arguments, victims = COMMANDS[kind]
    watched, chosen, faults = Watched(folder, arguments), random.Random(kind), list[Fault]()
    try:
        watched.wait_for_rows(5)
        while len(faults) < repeat:
            # Past the step of the fault before, so that the supervisor sees progress and does not wait before it restarts.
            before_s = watched.wait_for_rows(chosen.randint(12, 24) if kind == "rank" else chosen.randint(3, 8))
            pids = victims(watched.run, chosen)
            if pids:
                faults.append(watched.fault(pids, before_s))
    finally:
        watched.close()
    return faults


def start_s(repeat: int) -> float:
    """The median seconds of Python with the imports of a rank."""
    took = []
    for _ in range(repeat):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        took.append(time.monotonic() - began)
    return statistics.median(took)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeat", type=int, default=20)
    options.add_argument("--kinds", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    chosen = options.parse_args()
    text, rows, numbers = machine(), list[str](), list[dict[str, object]]()
    for kind in chosen.kinds:
        imports_s = start_s(5)
        with tempfile.TemporaryDirectory() as scratch:
            faults = measure(kind, chosen.repeat, Path(scratch))
        steps, found = [fault.step_s for fault in faults], [fault.found_s for fault in faults]
        median, before = statistics.median(steps), statistics.median(fault.before_s for fault in faults)
        verdict = "met" if median <= LIMITS_S[kind] else "MISSED"
        rows.append(
            f"| {kind} | {len(faults)} | {statistics.median(found):.2f} | {median:.2f} | {min(steps):.2f} to {max(steps):.2f} | {imports_s:.2f} "
            f"({100 * imports_s / median:.0f} %) | {before:.2f} | {LIMITS_S[kind]:g}: {verdict} |"
        )
        numbers.append({"fault": kind, "detection_s": round(statistics.median(found), 3), "next_step_s": round(median, 3)})
        print(rows[-1], json.dumps([[round(fault.found_s, 2), round(fault.step_s, 2)] for fault in faults]), flush=True)
    report = "\n".join([
        "# From a fault to the next training step", "", text, "",
        "Seconds; medians. A rank of two of a run on data; a node: all processes of one of two pods that both train, in a run of reinforcement learning, "
        "whose next step includes a rollout and the rewards. Imports: Python with the imports of one rank, alone.", "",
        "| fault | faults | until found | until the next step | of all | imports of a rank | a step before | limit |", 8 * "|---" + "|", *rows,
    ])  # fmt: skip
    path = write_report("recovery-time", report, chosen.out)
    with path.with_suffix(".csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, ["fault", "detection_s", "next_step_s"])
        writer.writeheader()
        writer.writerows(numbers)
    print(report)


if __name__ == "__main__":
    main()
