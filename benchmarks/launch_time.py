"""Seconds from the command to the end of the first training step: ``tandem train`` on two ranks beside plain ``torchrun`` with an equivalent script, in turn.

    python benchmarks/launch_time.py [--rounds 10] [--ray] [--slurm]

``--ray``: also as a job on a Ray that runs already (``--on ray --ray.address``), whose own start is apart. ``--slurm``: also as a job of a Slurm of one node
that runs already; what it takes to start a job that only makes a file (``sbatch``), which is measured in the same turns, is its own start, and apart. Slurm
needs root and the Debian packages slurm-wlm and munge.

Both train a decoder of one layer on two data-parallel ranks over gloo, with one thread each, and are ended after their first step. Tandem also makes and
tokenizes its data, checks the recipe and the machine, and keeps a journal; ``peers/plain_torchrun.py`` draws random tokens.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from machine import ROOT, best_and_median, machine, write_report
from options import parser

sys.path.insert(0, str(ROOT / "tests"))

from slurm_cluster import WHY_SKIPPED, SlurmCluster, is_installed

TANDEM = (sys.executable, "-m", "tandem.cli.main")
LIMIT = 1.3
ON_RAY, ON_SLURM, EMPTY_JOB = "tandem train --on ray", "tandem train --on slurm", "sbatch of an empty job"
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


def tandem_s(folder: Path, *more: str) -> float:
    recipe = str(ROOT / "tests" / "cluster" / "tiny.yaml")
    settings = [f"--run.directory={folder}", "--run.name=run", "--parallel.data=2", "--run.max_steps=500"]
    command = [*TANDEM, "train", recipe, *settings, *more]
    metrics = folder / "run" / "metrics.jsonl"
    return seconds(command, lambda: metrics.exists() and metrics.stat().st_size > 0, folder)


def launched_s(folder: Path, *where: str) -> float:
    try:
        return tandem_s(folder, *where)
    finally:
        subprocess.run([*TANDEM, "cancel", str(folder / "run"), "--now"], check=True, capture_output=True)


@contextlib.contextmanager
def ray_cluster() -> Iterator[tuple[str, float]]:
    """Yields the address of a Ray of two cores on this machine, and how many seconds its start took."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        port, client_port = (probe.getsockname()[1] for probe in (one, other))
        one.close()
        other.close()
        options = [
            "--head", "--block", "--num-cpus=2", "--num-gpus=0", f"--port={port}", f"--ray-client-server-port={client_port}", f"--temp-dir={folder}",
            "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--no-monitor", "--object-store-memory=80000000", "--disable-usage-stats",
        ]  # fmt: skip
        log, began = Path(folder, "start.log"), time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen([str(Path(sys.executable).with_name("ray")), "start", *options], stdout=output, stderr=output, start_new_session=True)
        try:
            while "Ray runtime started" not in log.read_text():
                if process.poll() is not None or time.monotonic() - began > _LIMIT_S:
                    sys.exit(log.read_text())
                time.sleep(0.02)
            yield f"127.0.0.1:{port}", time.monotonic() - began
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def slurm_node(folder: Path) -> Iterator[SlurmCluster]:
    """Yields a Slurm of one node with two cores on this machine, which the commands of this process find."""
    if not is_installed():
        sys.exit(WHY_SKIPPED)
    cluster = SlurmCluster(folder, nodes=1)
    try:
        os.environ |= cluster.start().environment
        yield cluster
    finally:
        cluster.stop()


def empty_job_s(cluster: SlurmCluster, folder: Path) -> float:
    """Returns the seconds from ``sbatch`` to the first command of its job."""
    mark = folder / "begun"
    try:
        return seconds(["sbatch", "--output=/dev/null", f"--wrap=touch {mark}"], mark.exists, folder)
    finally:
        cluster.clear()


def on_slurm_s(cluster: SlurmCluster, folder: Path) -> float:
    try:
        return launched_s(folder, "--on", "slurm")
    finally:
        cluster.clear()


def torchrun_s(folder: Path) -> float:
    script, mark = str(ROOT / "benchmarks" / "peers" / "plain_torchrun.py"), folder / "first-step"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, str(mark)]
    return seconds(command, mark.exists, folder)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--ray", action="store_true", help="also on a Ray that runs already")
    options.add_argument("--slurm", action="store_true", help="also on a Slurm that runs already")
    chosen = options.parse_args()
    text = machine()
    with contextlib.ExitStack() as stack:
        ways: dict[str, Callable[[Path], float]] = {"tandem train": tandem_s, "torchrun": torchrun_s}
        start_s = 0.0
        if chosen.ray:
            address, start_s = stack.enter_context(ray_cluster())
            ways[ON_RAY] = lambda folder: launched_s(folder, "--on", "ray", f"--ray.address={address}")
        if chosen.slurm:
            cluster = stack.enter_context(slurm_node(Path(stack.enter_context(tempfile.TemporaryDirectory()), "slurm")))
            ways |= {ON_SLURM: partial(on_slurm_s, cluster), EMPTY_JOB: partial(empty_job_s, cluster)}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(chosen.rounds + 1):
            for name, measured in ways.items():
                with tempfile.TemporaryDirectory() as scratch:
                    took = measured(Path(scratch))
                # The first of each warms the disk's cache.
                if turn:
                    taken[name].append(took)
    medians = {name: best_and_median(values)[1] for name, values in taken.items()}
    own_s = {ON_SLURM: medians.get(EMPTY_JOB, 0.0)}
    ratios = {name: (median - own_s.get(name, 0.0)) / medians["torchrun"] for name, median in medians.items() if name not in ("torchrun", EMPTY_JOB)}
    words = {name: 'met' if ratio <= LIMIT else 'MISSED' for name, ratio in ratios.items()}
    verdicts = [
        f"`{name}` takes {ratio:.2f} times as long as `torchrun`; the limit is {LIMIT}: {words[name]}." for name, ratio in ratios.items()
    ]
    report = "\n".join([
        "# From the command to the end of the first step", "", text, "", f"{chosen.rounds} of each, in turn; two ranks on this machine.", "",
        "| command | best s | median s |", "|---|---|---|", *(f"| {name} | {min(values):.2f} | {medians[name]:.2f} |" for name, values in taken.items()), "",
        *verdicts,
        *(["", f"Ray's own start, which is apart, took {start_s:.1f} s."] if chosen.ray else []),
        *(["", f"Slurm's own start, which is apart, is that of a job that only makes a file: {own_s[ON_SLURM]:.2f} s."] if chosen.slurm else []),
    ])  # fmt: skip
    print(report)
    write_report("-".join(["launch-time", *(["ray"] if chosen.ray else []), *(["slurm"] if chosen.slurm else [])]), report, chosen.out)


if __name__ == "__main__":
    main()
