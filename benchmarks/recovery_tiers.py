"""How soon lost ranks have their state again: from the memory of a peer node, from the local disk, from the run's folder, and from an object store.

    python benchmarks/recovery_tiers.py [--hidden N] [--layers N] [--repeats N] [--work FOLDER]

One pretraining run on two nodes of one rank each (``parallel.ranks_per_node: 1``), with ``checkpoint.memory_every_steps: 1`` and ``checkpoint.upload`` to an
S3 server (moto, in a process of its own on this machine). Every process of node 1, its rank and the keeper of its memory, is killed with SIGKILL, again and
again; the state comes from the memory of node 0. Then every process of the run is killed, again and again, and the run resumed: the state comes from the local
disk (``checkpoint.local_every_steps: 1``). When it has finished, which leaves nothing on the local disk, it is resumed with its folder's checkpoints as they
are, and with the first byte of each of their files flipped, so that the state comes from the object store. The seconds are those of the journal's event
``checkpoint_loaded``: from the first look for a checkpoint until all ranks have it, verified. Starting processes is not part of them, as it is the same for
every tier.
"""

import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from machine import machine, write_report
from options import parser
from peers.clock import family

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "jobs"))

# isort: split
from package_data import make_datasets

from tandem.report.run_facts import RESULT_KEY
from tandem.runtime.records.checkpoint_tiers import tiers_of
from tandem.runtime.records.journal import Journal

TIERS = {"memory": "memory of the peer node", "local": "local disk", "folder": "the run's folder (on the same disk)", "upload": "object store (S3)"}


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Yields the environment by which an S3 server of its own is reached."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/moto-api/", timeout=1).read()
                break
            except OSError:
                time.sleep(0.1)
        yield {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}
    finally:
        process.terminate()
        process.wait()


def write_recipe(folder: Path, made: Path, hidden: int, layers: int, steps: int) -> None:
    recipe = {
        "algorithm": {"name": "pretrain"},
        "model": {
            "create": {
                "architecture": "qwen3", "tokenizer": str(made / "tokenizer"), "hidden_size": hidden, "num_hidden_layers": layers,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4, "intermediate_size": 3 * hidden, "max_position_embeddings": 64,
            }
        },
        "data": {"train": [{"path": str(made / "json")}], "sequence_length": 32, "global_batch_size": 2},
        "evaluation": {"every_steps": 100000}, "trainer": {"learning_rate": 1e-4}, "machine": {"threads": 1},
        "checkpoint": {"every_steps": steps, "keep": 1, "memory_every_steps": 1, "upload": "s3://tandem-recovery/run",
                       "local_directory": str(folder / "local"), "local_every_steps": 1},
        "parallel": {"data": 2, "ranks_per_node": 1, "zero": 1},
        "run": {"directory": str(folder), "name": "run", "max_steps": steps, "max_restarts": 1000},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def kill_node_1(command_pid: int) -> None:
    for child in family(command_pid):
        line = Path(f"/proc/{child}/cmdline").read_bytes().decode()
        if re.search(r'"rank": 1\b', line) or "memory.keeper\x001" in line:
            os.kill(child, signal.SIGKILL)


def loaded(run: Path) -> list[dict[str, Any]]:
    if not (run / "journal.sqlite").exists():
        return []
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        return [event.detail for event in journal.events() if event.kind == "checkpoint_loaded"]


def is_in_memory(run: Path, after: int) -> bool:
    """Returns whether two checkpoints of steps above ``after`` were begun in memory. The first one has ended when the second one begins."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()[after:] if path.exists() else []
    return sum("timing_s/checkpoint_copy_stall" in line for line in lines) >= 2


def train_and_kill(folder: Path, environment: Mapping[str, str], repeats: int) -> None:
    """Runs the recipe to its end and kills node 1 ``repeats`` times, each when a checkpoint newer than the last recovery's is in memory; then all processes as
    often, each when one is on the local disk, and resumes the run."""
    process, run, killed = command(folder, environment, "train", "recipe.yaml"), folder / "run", 0
    try:
        while process.poll() is None:
            events = loaded(run)
            last = events[-1]["step"] if events else 0
            if len(events) == killed < repeats and is_in_memory(run, last):
                kill_node_1(process.pid)
                killed += 1
            elif repeats <= len(events) == killed < 2 * repeats and is_on_disk(run, last):
                process.kill()
                process.wait()
                process = command(folder, environment, "resume", "run")
                killed += 1
            time.sleep(0.1)
        if process.returncode or killed < 2 * repeats:
            raise SystemExit(f"the run ended with status {process.returncode} after {killed} kills; see '{run / 'logs'}'")
    finally:
        process.kill()
        process.wait()


def command(folder: Path, environment: Mapping[str, str], *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "tandem.cli.main", *arguments], cwd=folder, env=dict(environment), stdout=subprocess.DEVNULL)


def is_on_disk(run: Path, after: int) -> bool:
    """Returns whether a checkpoint of a step above ``after`` is on the local disk."""
    return any(state.tier == "local" and state.step > after for state in tiers_of(run))


def resume(folder: Path, environment: Mapping[str, str], *, damaged: bool) -> None:
    run = folder / "run"
    with Journal(run / "journal.sqlite") as journal:
        journal.set(RESULT_KEY, None)
    for path in (run / "checkpoints").glob("step-*/*.safetensors") if damaged else ():
        with path.open("r+b") as file:
            first = file.read(1)[0]
            file.seek(0)
            file.write(bytes([first ^ 1]))
    subprocess.run([sys.executable, "-m", "tandem.cli.main", "resume", "run"], cwd=folder, env=dict(environment), check=True, stdout=subprocess.DEVNULL)


def report(events: list[dict[str, Any]], hidden: int, layers: int, repeats: int) -> str:
    medians = {tier: statistics.median(each["seconds"] for each in events if each["tier"] == tier) for tier in TIERS}
    lines = [
        "# Recovery from the tiers of checkpoints", "", machine(), "",
        f"A model of {layers} layers of width {hidden} with AdamW's moments, on two nodes of one rank each (ZeRO 1) of this machine; the object store is "
        f"moto's S3 server on this machine, so its network costs nothing. What was written to a disk just before is read from the page cache. "
        f"Recoveries from each tier in one run (`recovery_tiers.py`): {repeats}.", "",
        "| tier | checkpoint | seconds, median | all | rate |", "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for tier, name in TIERS.items():
        mine = [each for each in events if each["tier"] == tier]
        size = mine[0]["bytes"]
        every = ", ".join(f"{each['seconds']:.2f}" for each in mine)
        lines.append(f"| {name} | {size / 2**20:,.0f} MiB | {medians[tier]:.2f} | {every} | {size / medians[tier] / 2**20:,.0f} MiB/s |")
    ratio = medians["upload"] / medians["memory"]
    lines += ["", f"**From the memory of the peer the ranks have their state {ratio:.1f} times as fast as from the object store.**", ""]
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__ or "", work="the run and its data are")
    options.add_argument("--hidden", type=int, default=512)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    folder = given.work.resolve() / "recovery-tiers"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    made = make_datasets(folder / "data", "json")
    write_recipe(folder, made, given.hidden, given.layers, steps=24 * given.repeats + 24)
    with s3_server() as settings:
        environment = {**os.environ, **settings, "OMP_NUM_THREADS": "1"}
        os.environ.update(settings)
        import s3fs

        s3fs.S3FileSystem().makedirs("tandem-recovery", exist_ok=True)
        train_and_kill(folder, environment, given.repeats)
        for damaged in (False, True):
            for _ in range(given.repeats):
                resume(folder, environment, damaged=damaged)
    text = report(loaded(folder / "run"), given.hidden, given.layers, given.repeats)
    print(text)
    print(f"wrote {write_report('recovery-tiers', text, given.out)}")
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
