"""Seconds from the command to the end of the first training step: ``tandem train`` on two ranks beside plain ``torchrun`` with an equivalent script, in turn.

    python benchmarks/launch_time.py [--rounds 10]

Both train a decoder of one layer on two data-parallel ranks over gloo, with one thread each, and are ended after their first step. Tandem also makes and
tokenizes its data, checks the recipe and the machine, and keeps a journal; ``peers/plain_torchrun.py`` draws random tokens.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from machine import ROOT, best_and_median, machine, write_report
from options import parser

LIMIT = 1.3
_LIMIT_S = 180.0


def seconds(command: Sequence[str], is_done: Callable[[], bool], folder: Path) -> float:
    """From the start of ``command`` until ``is_done``; its processes are ended then."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "output").open("wb") as output:
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            while not is_done():
                if time.monotonic() - began > _LIMIT_S or (process.poll() not in (None, 0)):
                    sys.exit(f"{command}:\n{(folder / 'output').read_text()[-3000:]}")
                time.sleep(0.002)
            return time.monotonic() - began
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def tandem_s(folder: Path) -> float:
    recipe = str(ROOT / "tests" / "cluster" / "tiny.yaml")
    settings = [f"--run.directory={folder}", "--run.name=run", "--parallel.data=2", "--run.max_steps=500"]
    command = [sys.executable, "-m", "tandem.cli.main", "train", recipe, *settings]
    metrics = folder / "run" / "metrics.jsonl"
    return seconds(command, lambda: metrics.exists() and metrics.stat().st_size > 0, folder)


def torchrun_s(folder: Path) -> float:
    script, mark = str(ROOT / "benchmarks" / "peers" / "plain_torchrun.py"), folder / "first-step"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, str(mark)]
    return seconds(command, mark.exists, folder)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10)
    chosen = options.parse_args()
    text, found = machine(), {"tandem train": list[float](), "torchrun": list[float]()}
    for turn in range(chosen.rounds + 1):
        for name, measured in (("tandem train", tandem_s), ("torchrun", torchrun_s)):
            with tempfile.TemporaryDirectory() as scratch:
                took = measured(Path(scratch))
            # The first of each warms the disk's cache.
            if turn:
                found[name].append(took)
    medians = {name: best_and_median(values)[1] for name, values in found.items()}
    ratio = medians["tandem train"] / medians["torchrun"]
    report = "\n".join([
        "# From the command to the end of the first step", "", text, "", f"{chosen.rounds} of each, in turn; two ranks on this machine.", "",
        "| command | best s | median s |", "|---|---|---|", *(f"| {name} | {min(values):.2f} | {medians[name]:.2f} |" for name, values in found.items()), "",
        f"`tandem train` takes {ratio:.2f} times as long as `torchrun`; the limit is {LIMIT}: {'met' if ratio <= LIMIT else 'MISSED'}.",
    ])  # fmt: skip
    print(report)
    write_report("launch-time", report, chosen.out)


if __name__ == "__main__":
    main()
